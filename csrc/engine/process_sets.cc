#include "engine/process_sets.h"

#include <algorithm>
#include <numeric>

#include "transport/subset_transport.h"

namespace qsgd {

ProcessSets::ProcessSets(Communicator whole, ReducerConfig config)
    : whole_(whole), config_(std::move(config)) {
  std::vector<int> everyone(static_cast<size_t>(whole_.transport.size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  Set& set = sets_[0];
  set.operations = std::make_unique<Operations>(whole_, everyone, config_);
  set.ranks = std::make_shared<const std::vector<int>>(std::move(everyone));
}

void ProcessSets::add(int32_t id, const std::vector<int>& ranks) {
  Set set;
  set.ranks = std::make_shared<const std::vector<int>>(ranks);
  if (std::count(ranks.begin(), ranks.end(), whole_.transport.rank()) > 0) {
    set.transport = std::make_unique<SubsetTransport>(whole_.transport, ranks);
    const Communicator communicator{*set.transport, nullptr, whole_.workers};
    set.operations = std::make_unique<Operations>(communicator, ranks, config_);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  sets_[id] = std::move(set);
}

std::map<std::string, TensorQuality> ProcessSets::quality() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, TensorQuality> all;
  for (const auto& [id, set] : sets_) {
    if (set.operations != nullptr) all.merge(set.operations->reducer().quality().all());
  }
  return all;
}

Reducer* ProcessSets::reducer(int32_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Operations* const operations = find(id).operations.get();
  return operations == nullptr ? nullptr : &operations->reducer();
}

void ProcessSets::forget_owed(const std::vector<std::string>& names) {
  for (auto& [id, set] : sets_) {
    if (set.operations == nullptr) continue;
    for (const std::string& name : names) set.operations->reducer().residuals().forget(name);
  }
}

void ProcessSets::close() {
  for (auto& [id, set] : sets_) {
    if (set.operations != nullptr) set.operations->close();
  }
}

void ProcessSets::remove(int32_t id) {
  if (const Set& set = sets_.at(id); set.operations != nullptr) set.operations->close();
  const std::lock_guard<std::mutex> lock(mutex_);
  sets_.erase(id);
}

const ProcessSets::Set& ProcessSets::find(int32_t id) const {
  const auto it = sets_.find(id);
  if (it != sets_.end()) return it->second;
  throw usage_error("rank " + std::to_string(whole_.transport.rank()) + ": there is no process " +
                    "set " + std::to_string(id) + "; add it on all ranks first");
}

std::shared_ptr<const std::vector<int>> ProcessSets::ranks_for(const Operation& operation) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Set& set = find(operation.set);
  if (set.operations != nullptr) return set.ranks;
  throw usage_error("'" + operation.name + "': rank " + std::to_string(whole_.transport.rank()) +
                    " is not in process set " + std::to_string(operation.set) + " of ranks " +
                    describe({set.ranks->begin(), set.ranks->end()}) +
                    "; only its ranks may call its operations");
}

void ProcessSets::check_removable(int32_t id) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  find(id);
  if (id == 0) throw usage_error("process set 0 is all ranks, and cannot be removed");
}

}  // namespace qsgd
