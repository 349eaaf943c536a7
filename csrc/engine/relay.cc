#include "engine/relay.h"

#include <algorithm>
#include <iterator>

namespace qsgd {
namespace {

constexpr std::chrono::milliseconds kLook{10};

bool are_equal(const OperationPtr& a, const OperationPtr& b) {
  return a == b || difference(0, *a, 0, *b).empty();
}

void note_rows(const RankSet& ranks, const Submission& submission, std::map<int, int64_t>& rows) {
  size_t place = 0;
  for (const int rank : ranks.list()) rows[rank] = submission.rows_of(place++);
}

// Empty if each rank has the rows of the operation.
Numbers rows_apart(const Operation& operation, const std::map<int, int64_t>& by_rank) {
  Numbers rows;
  bool equal = true;
  for (const auto& [rank, count] : by_rank) {
    rows.push_back(count);
    equal = equal && count == operation.rows();
  }
  return equal ? Numbers() : rows;
}

}  // namespace

Relay::Relay(const Tree& tree, Clock::duration patience) : tree_(tree), patience_(patience) {
  add_set(0, std::make_shared<const RankSet>(RankSet::all(tree.size())));
}

void Relay::add_set(int32_t id, Members members) {
  Set& set = sets_[id];
  set.ours = *members & tree_.ours();
  set.is_of_others = !set.ours.empty() && !members->has(tree_.rank());
  set.members = std::move(members);
}

Members Relay::members(int32_t set) const {
  const auto it = sets_.find(set);
  return it == sets_.end() ? nullptr : it->second.members;
}

bool Relay::has_sets_of_others() const {
  return std::any_of(sets_.begin(), sets_.end(),
                     [](const auto& set) { return set.second.is_of_others; });
}

void Relay::submit(const RankSet& ranks, Submission submission) {
  if (tree_.children().empty()) return add_report(ranks, /*whole=*/true, std::move(submission));
  const OperationPtr operation = submission.operation;
  const Operation& o = *operation;
  // Operations submitted before these must be reported to rank 0 before them.
  if (o.kind == OpKind::kJoin || o.kind == OpKind::kRemoveSet) open_all();
  if (o.kind == OpKind::kJoin) {
    joined_ |= ranks;
    groups_ = GroupTally();  // nothing is counted until all have joined
  }
  const bool unblocks = blocked_.meets(ranks);  // rank 0 must receive its reports
  if (unblocks) blocked_ -= ranks;
  const auto set = sets_.find(o.set);
  if (set == sets_.end() || is_unmerged()) {
    return add_report(ranks, /*whole=*/false, std::move(submission));
  }
  const auto [it, fresh] = entries_.try_emplace(o.key());
  Entry& entry = it->second;
  if (fresh && set->second.is_of_others) ++others_;
  if (fresh || entry.reported) entry = Entry();
  if (entry.operation == nullptr) {
    entry.operation = operation;
    entry.since = Clock::now();
  }
  if (unblocks || !are_equal(entry.operation, operation)) open(entry);
  if (!o.on_device) entry.operation = operation;  // on_device: on all ranks
  entry.ranks |= ranks;
  entry.last = submission.last < 0 ? ranks.first() : submission.last;
  if (entry.open) {
    add_report(ranks, /*whole=*/false, std::move(submission));
  } else {
    entry.nmse = std::max(entry.nmse, submission.nmse);
    if (o.kind == OpKind::kAllgather) note_rows(ranks, submission, entry.rows);
  }
  if (entry.ranks.contains(set->second.ours)) {
    if (!entry.open) add_report(entry.ranks, /*whole=*/true, combined(entry));
    entry.reported = true;
    if (!set->second.is_of_others) end(it);
  }
  if (!o.group) return;
  groups_.note(ranks, group_of(o), o.group->size);
  open_group(group_of(o), set->second.ours);
}

// All ranks of this subtree have submitted as many members of a group as they announced: operations
// that only some of them have will never be complete.
void Relay::open_group(const GroupKey& key, const RankSet& ours) {
  if (!groups_.is_whole(key, ours, RankSet())) return;
  groups_.forget(key);
  for (auto& [name, entry] : entries_) {
    if (entry.operation != nullptr && group_of(*entry.operation) == key) open(entry);
  }
}

Submission Relay::combined(const Entry& entry) {
  return {entry.operation, entry.nmse, rows_apart(*entry.operation, entry.rows), entry.last};
}

void Relay::open(Entry& entry) {
  if (entry.open || entry.reported) return;
  entry.open = true;
  if (entry.ranks.empty()) return;
  add_report(entry.ranks, /*whole=*/false, combined(entry));
}

void Relay::open_all() {
  for (auto& [key, entry] : entries_) open(entry);
}

void Relay::end(Table::iterator it) {
  const auto set = sets_.find(it->first.first);
  if (set != sets_.end() && set->second.is_of_others) --others_;
  entries_.erase(it);
}

void Relay::add_report(const RankSet& ranks, bool whole, Submission submission) {
  const bool together = !reports_.empty() && reports_.back().whole == whole &&
                        (whole || reports_.back().ranks == ranks);
  if (!together) reports_.push_back({whole ? RankSet() : ranks, whole, {}});
  reports_.back().submissions.push_back(std::move(submission));
}

void Relay::leave(int rank) {
  open_all();
  left_.add(rank);
}

void Relay::block(int rank) {
  open_all();
  blocked_.add(rank);
}

void Relay::report_unmerged(const std::vector<Key>& keys) {
  for (const Key& key : keys) {
    const auto set = sets_.find(key.first);
    if (set == sets_.end() || set->second.ours.empty()) continue;
    const auto [it, fresh] = entries_.try_emplace(key);
    if (fresh && set->second.is_of_others) ++others_;
    open(it->second);
  }
}

void Relay::report_all_unmerged() {
  open_all();
  unmerged_ = true;
}

void Relay::watch() {
  if (entries_.empty()) return;
  const auto now = Clock::now();
  if (now - last_look_ < kLook) return;
  last_look_ = now;
  for (auto& [key, entry] : entries_) {
    if (now - entry.since >= patience_) open(entry);
  }
}

void Relay::note(const Response& response) {
  // Rank 0 may fail an operation before all have submitted it; later submissions then count as the
  // next operation of the name, as on rank 0.
  for (size_t i = 0; i < response.names.size() && !entries_.empty(); ++i) {
    const auto it = entries_.find({response.set, response.names[i]});
    if (it == entries_.end()) continue;
    Entry& entry = it->second;
    const bool fails = response.fault && entry.operation != nullptr;
    if (fails && entry.operation->group) groups_.forget(group_of(*entry.operation));
    open(entry);
    end(it);
  }
  if (response.fault || response.operations.empty()) return;
  const Operation& o = *response.operations.front();
  const auto id = static_cast<int32_t>(response.value);
  if (o.kind == OpKind::kJoin) joined_.clear();
  if (o.kind == OpKind::kAddSet) add_set(id, std::make_shared<const RankSet>(RankSet::of(o.ranks)));
  if (o.kind != OpKind::kRemoveSet) return;
  for (auto it = entries_.lower_bound({id, ""}); it != entries_.end() && it->first.first == id;) {
    const auto next = std::next(it);
    open(it->second);
    end(it);
    it = next;
  }
  sets_.erase(id);
}

}  // namespace qsgd
