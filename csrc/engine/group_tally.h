// Counts which ranks have submitted all members of a group, and stores which groups are broken.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "engine/operation.h"
#include "engine/rank_set.h"

namespace qsgd {

using GroupKey = std::pair<int32_t, std::string>;  // process set and group

// For an operation without a group: a key with an empty name.
inline GroupKey group_of(const Operation& o) { return {o.set, o.group ? o.group->name : ""}; }

class GroupTally {
 public:
  // Each of `ranks` has submitted one more of the announced number of members. `presumed`: it has
  // submitted another rank's member without the group, which counts until it begins the group.
  void note(RankSet ranks, const GroupKey& key, uint32_t announced, bool presumed = false);
  // Whether each of `ranks`, except those that have joined, has submitted all announced members.
  bool is_whole(const GroupKey& key, const RankSet& ranks, const RankSet& joined) const;
  // Marks the group as failed: its members fail, including those submitted later, until every rank
  // has submitted all announced members. Ignores a group without submissions.
  void break_up(const GroupKey& key, Fault fault);
  bool has(const GroupKey& key) const { return groups_.count(key) != 0; }
  // Whether every rank that has begun the group has submitted all announced members.
  bool is_over(const GroupKey& key) const;
  // The error of a broken group; none otherwise.
  Fault fault_of(const GroupKey& key) const;
  void forget(const GroupKey& key) { groups_.erase(key); }
  std::vector<GroupKey> keys() const;

 private:
  struct Count {
    RankSet ranks;
    uint32_t submitted = 0;
    uint32_t expected = 0;
    bool presumed = false;
  };
  struct Group {
    std::vector<Count> counts;  // one per set of ranks with equal counts
    Fault fault;
  };
  std::map<GroupKey, Group> groups_;
};

}  // namespace qsgd
