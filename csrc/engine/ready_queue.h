// Rank 0's queue of operations that can be executed: holds groups back until they are complete, and
// fuses.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "engine/group_tally.h"
#include "engine/operation.h"
#include "engine/response.h"

namespace qsgd {

// An operation that every rank of its set has submitted, or that must fail on all of them.
struct Agreed {
  OperationPtr operation;
  Members ranks;                    // of its set
  bool grouped = false;             // held back until its group is complete
  std::optional<CodecSpec> coding;  // in which it is sent
  Fault fault;
  double nmse = 0;            // the largest that a rank has reported
  std::vector<int64_t> rows;  // of an allgather
  int64_t value = 0;          // result of operations that return a number
  Algorithm algorithm = Algorithm::kAuto;
  bool joined = false;   // a rank that has joined takes part without submitting it
  uint64_t group = 0;    // operations with one number complete together; 0: none
  bool decided = false;  // whether coding and algorithm are chosen
};

class ReadyQueue {
 public:
  // Holds members of groups back until their group is released.
  void push(Agreed agreed);
  // Releases a complete group. If one of its members failed, all do.
  void release(const GroupKey& key);
  // Fails the members so far of a group that cannot become complete.
  void fail_group(const GroupKey& key, const Fault& fault);
  // The operation if it is held back, agreed by all ranks, for its group; else null.
  const Operation* holds(const Key& key) const;
  bool empty() const { return ready_.empty(); }
  // What take() would return next, before fusing.
  std::vector<Agreed>& waiting() { return ready_; }
  // Returns everything, ordered by the first tensor of each fused message: compatible tensors up to
  // `fusion_bytes`, or a complete group of any size.
  std::vector<Response> take(size_t fusion_bytes);

 private:
  Response take_one(size_t fusion_bytes);

  std::vector<Agreed> ready_;
  std::map<GroupKey, std::vector<Agreed>> groups_;  // held back
  uint64_t last_group_ = 0;
};

}  // namespace qsgd
