// Rank 0's list of what can be carried out: holds groups back until they are whole, and fuses.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/group_tally.h"
#include "engine/operation.h"
#include "engine/response.h"

namespace qsgd {

// An operation that every rank of its set has submitted, or that all of them must fail.
struct Agreed {
  OperationPtr operation;
  Members ranks;                    // of its set
  bool grouped = false;             // held back for the others of its group
  std::optional<CodecSpec> coding;  // in which it travels
  ErrorKind error = ErrorKind::kNone;
  std::string message;
  double nmse = 0;            // the largest that a rank has reported
  std::vector<int64_t> rows;  // of an allgather
  int64_t value = 0;          // its answer
  Algorithm algorithm = Algorithm::kAuto;
  bool joined = false;   // some rank takes part that has not submitted it
  uint64_t group = 0;    // those of one number end together; 0: alone
  bool decided = false;  // how it travels
};

class ReadyQueue {
 public:
  // Members of groups are held back until their group is released.
  void push(Agreed agreed);
  // All of a group has come. If one of its members failed, all do.
  void release(const GroupKey& key);
  // Fails what has come of a group the rest of which can never come.
  void fail_group(const GroupKey& key, ErrorKind error, const std::string& message);
  bool empty() const { return ready_.empty(); }
  // What take() would return next, before it is fused.
  std::vector<Agreed>& waiting() { return ready_; }
  // Everything, in the order of the first of those that are fused: what may travel together, up to
  // so many bytes, or a group, however many there are.
  std::vector<Response> take(size_t fusion_bytes);

 private:
  Response take_one(size_t fusion_bytes);

  std::vector<Agreed> ready_;
  std::map<GroupKey, std::vector<Agreed>> groups_;  // held back
  uint64_t last_group_ = 0;
};

}  // namespace qsgd
