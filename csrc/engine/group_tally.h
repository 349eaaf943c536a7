// Counts which ranks have submitted all members of a group, and knows which groups are broken.
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

struct GroupFault {
  ErrorKind kind = ErrorKind::kNone;
  std::string message;
};

// Of an operation in no group: one without a name.
inline GroupKey group_of(const Operation& o) { return {o.set, o.group ? o.group->name : ""}; }

class GroupTally {
 public:
  // Each of `ranks` has submitted one more member, and says how many there are.
  void note(RankSet ranks, const Operation& member);
  // Whether every one of `ranks`, those apart that have joined, has submitted all it will.
  bool is_whole(const GroupKey& key, const RankSet& ranks, const RankSet& joined) const;
  // The group will not end well: its members fail, those too that are yet to come, until every
  // rank has submitted all that it will. Of a group that nobody has submitted to, nothing is kept.
  void break_up(const GroupKey& key, GroupFault fault);
  bool has(const GroupKey& key) const { return groups_.count(key) != 0; }
  // Whether every rank that has begun the group has submitted all it will.
  bool is_over(const GroupKey& key) const;
  // Why the group is broken; of kind kNone: it is not.
  GroupFault fault_of(const GroupKey& key) const;
  void forget(const GroupKey& key) { groups_.erase(key); }
  std::vector<GroupKey> keys() const;

 private:
  struct Count {
    RankSet ranks;
    uint32_t submitted = 0;
    uint32_t expected = 0;
  };
  struct Group {
    std::vector<Count> counts;  // of ranks that have submitted alike so far
    GroupFault fault;
  };
  std::map<GroupKey, Group> groups_;
};

}  // namespace qsgd
