// Counts which ranks have submitted all members of a group.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/submission.h"

namespace qsgd {

using GroupKey = std::pair<int32_t, std::string>;  // process set and group

inline GroupKey group_of(const Submission& s) { return {s.set, s.group}; }

class GroupTally {
 public:
  // `rank` has submitted one more member, and says how many there are.
  void note(int rank, const Submission& member);
  // Whether every one of `ranks`, those apart that have joined, has submitted all it will.
  bool is_whole(const GroupKey& key, const std::vector<int>& ranks,
                const std::vector<bool>& joined) const;
  void forget(const GroupKey& key) { counts_.erase(key); }
  std::vector<GroupKey> keys() const;

 private:
  struct Count {
    uint32_t submitted = 0;
    uint32_t expected = 0;
  };
  std::map<GroupKey, std::map<int, Count>> counts_;  // by rank
};

}  // namespace qsgd
