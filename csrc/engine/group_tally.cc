#include "engine/group_tally.h"

#include <algorithm>

namespace qsgd {

void GroupTally::note(int rank, const Operation& member) {
  Count& count = groups_[group_of(member)].counts[rank];
  ++count.submitted;
  count.expected = member.group->size;
}

bool GroupTally::is_whole(const GroupKey& key, const std::vector<int>& ranks,
                          const std::vector<bool>& joined) const {
  const auto group = groups_.find(key);
  if (group == groups_.end()) return false;
  const std::map<int, Count>& counts = group->second.counts;
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    const auto it = counts.find(rank);
    if (it == counts.end()) return bool(joined[static_cast<size_t>(rank)]);
    return it->second.submitted >= it->second.expected;
  });
}

bool GroupTally::is_over(const GroupKey& key) const {
  const auto group = groups_.find(key);
  if (group == groups_.end()) return true;
  const std::map<int, Count>& counts = group->second.counts;
  return std::all_of(counts.begin(), counts.end(), [](const auto& rank_and_count) {
    return rank_and_count.second.submitted >= rank_and_count.second.expected;
  });
}

void GroupTally::break_up(const GroupKey& key, GroupFault fault) {
  const auto group = groups_.find(key);
  if (group == groups_.end() || group->second.fault.kind != ErrorKind::kNone) return;
  group->second.fault = std::move(fault);
}

GroupFault GroupTally::fault_of(const GroupKey& key) const {
  const auto group = groups_.find(key);
  return group == groups_.end() ? GroupFault{} : group->second.fault;
}

std::vector<GroupKey> GroupTally::keys() const {
  std::vector<GroupKey> keys;
  for (const auto& [key, group] : groups_) keys.push_back(key);
  return keys;
}

}  // namespace qsgd
