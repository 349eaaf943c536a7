#include "engine/group_tally.h"

#include <algorithm>

namespace qsgd {

void GroupTally::note(int rank, const Submission& member) {
  Count& count = counts_[group_of(member)][rank];
  ++count.submitted;
  count.expected = member.group_size;
}

bool GroupTally::is_whole(const GroupKey& key, const std::vector<int>& ranks,
                          const std::vector<bool>& joined) const {
  const auto counts = counts_.find(key);
  if (counts == counts_.end()) return false;
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    const auto it = counts->second.find(rank);
    if (it == counts->second.end()) return bool(joined[static_cast<size_t>(rank)]);
    return it->second.submitted >= it->second.expected;
  });
}

std::vector<GroupKey> GroupTally::keys() const {
  std::vector<GroupKey> keys;
  for (const auto& [key, counts] : counts_) keys.push_back(key);
  return keys;
}

}  // namespace qsgd
