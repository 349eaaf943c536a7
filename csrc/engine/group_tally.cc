#include "engine/group_tally.h"

#include <algorithm>

namespace qsgd {

void GroupTally::note(RankSet ranks, const GroupKey& key, uint32_t announced, bool presumed) {
  std::vector<Count>& counts = groups_[key].counts;
  const size_t before = counts.size();
  for (size_t i = 0; i < before && !ranks.empty(); ++i) {
    if (!counts[i].ranks.meets(ranks)) continue;
    Count some = counts[i];
    some.ranks &= ranks;
    ranks -= some.ranks;
    if (presumed && !some.presumed) continue;
    counts[i].ranks -= some.ranks;
    some.submitted = some.presumed == presumed ? some.submitted + 1 : 1;
    some.presumed = presumed;
    some.expected = announced;
    if (counts[i].ranks.empty()) {
      counts[i] = std::move(some);
    } else {
      counts.push_back(std::move(some));
    }
  }
  if (!ranks.empty()) counts.push_back({std::move(ranks), 1, announced, presumed});
}

bool GroupTally::is_whole(const GroupKey& key, const RankSet& ranks, const RankSet& joined) const {
  const auto group = groups_.find(key);
  if (group == groups_.end()) return false;
  RankSet missing = ranks - joined;
  for (const Count& count : group->second.counts) {
    if (count.submitted < count.expected && count.ranks.meets(ranks)) return false;
    missing -= count.ranks;
  }
  return missing.empty();
}

bool GroupTally::is_over(const GroupKey& key) const {
  const auto group = groups_.find(key);
  if (group == groups_.end()) return true;
  const std::vector<Count>& counts = group->second.counts;
  return std::all_of(counts.begin(), counts.end(),
                     [](const Count& count) { return count.submitted >= count.expected; });
}

void GroupTally::break_up(const GroupKey& key, Fault fault) {
  const auto group = groups_.find(key);
  if (group == groups_.end() || group->second.fault) return;
  group->second.fault = std::move(fault);
}

Fault GroupTally::fault_of(const GroupKey& key) const {
  const auto group = groups_.find(key);
  return group == groups_.end() ? Fault{} : group->second.fault;
}

std::vector<GroupKey> GroupTally::keys() const {
  std::vector<GroupKey> keys;
  for (const auto& [key, group] : groups_) keys.push_back(key);
  return keys;
}

}  // namespace qsgd
