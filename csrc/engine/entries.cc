#include "engine/entries.h"

namespace qsgd {

void Entries::add(Entry entry) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Key key = entry.operation->key();
  entries_.emplace(std::move(key), std::move(entry));
}

bool Entries::has(const Key& key) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.count(key) != 0;
}

bool Entries::has(const Key& key, OpKind kind) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(key);
  return it != entries_.end() && it->second.operation->kind == kind;
}

size_t Entries::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.size();
}

std::string Entries::example() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.empty() ? "" : entries_.begin()->first.second;
}

std::vector<Key> Entries::waited_for(double seconds) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Key> keys;
  for (const auto& [key, entry] : entries_) {
    if (entry.handle->waited_for(seconds)) keys.push_back(key);
  }
  return keys;
}

Entry* Entries::find(const Key& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;  // pointers to map nodes stay valid
}

void Entries::end(std::vector<Ended> ended) {
  std::vector<std::shared_ptr<Handle>> handles(ended.size());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < ended.size(); ++i) {
      const auto it = entries_.find(ended[i].first);
      if (it == entries_.end()) continue;  // already failed, or never submitted here
      handles[i] = std::move(it->second.handle);
      entries_.erase(it);
    }
  }
  for (size_t i = 0; i < ended.size(); ++i) {
    Outcome& outcome = ended[i].second;
    if (!handles[i]) continue;
    if (outcome.fault) {
      handles[i]->fail(std::move(outcome.fault));
    } else {
      handles[i]->finish(std::move(outcome.result));
    }
  }
}

void Entries::fail_all(const std::string& message) {
  KeyMap<Entry> entries;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries.swap(entries_);
  }
  for (auto& [key, entry] : entries) entry.handle->fail({ErrorKind::kRankFailed, message});
}

}  // namespace qsgd
