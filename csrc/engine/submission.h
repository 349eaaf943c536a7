// What a rank asks for: one named operation on one tensor. Its facts must agree on every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/reduce.h"
#include "common/bytes.h"
#include "quant/codec.h"

namespace qsgd {

using Key = std::pair<int32_t, std::string>;  // of an operation: process set and name

enum class OpKind : uint8_t {
  kAllreduce,
  kBroadcast,
  kAllgather,
  kAlltoall,
  kReducescatter,
  kBarrier,
  kJoin,
  kAddSet,
  kRemoveSet,
};
const char* describe(OpKind kind);
// Whether it deals with the first dimension apart from the others.
bool has_rows(OpKind kind);

std::string describe(const std::vector<int64_t>& list);

constexpr size_t kMaxName = 1024;  // bytes

struct Submission {
  std::string name;  // of its own within the process set
  int32_t set = 0;   // process set; 0 is everyone
  OpKind kind = OpKind::kAllreduce;
  std::vector<int64_t> shape;
  ReduceArgs args;              // dtype for every kind; the rest for the reductions
  int32_t root = 0;             // for broadcast
  std::vector<int64_t> splits;  // for alltoall: rows for each rank; stays on this rank
  std::vector<int64_t> ranks;   // of a process set to add; or the number of one to remove
  std::string group;            // operations of one group are carried out, and end, together
  uint32_t group_size = 0;
  std::optional<CodecSpec> coding;  // none: travels as it is
  bool auto_bits = false;           // of coding: 8 or 4 or none at all, as the planner says
  bool error_feedback = false;
  double nmse_budget = 0;     // 0: none; else coding that exceeds it gets more bits
  bool lasting = false;       // the name comes again, so what is known of it is kept
  bool check_finite = false;  // NaN or Inf in the result is an event to report
  // What other ranks are not told:
  double nmse = 0;       // of this rank's codes of the name when it last came; the engine's own
  bool foreign = false;  // a framework waits for it by itself, and no thread in its handle

  size_t count() const;
  size_t size_bytes() const { return count() * facts(args.dtype).size; }
  // Of what the first dimension counts.
  int64_t rows() const { return shape.front(); }
  size_t row_count() const;  // elements
  size_t row_bytes() const { return row_count() * facts(args.dtype).size; }
  void write(Writer& to) const;
  static Submission read(Reader& from);
};

void write_list(const std::vector<int64_t>& list, Writer& to);
std::vector<int64_t> read_list(Reader& from);
void write_coding(const std::optional<CodecSpec>& coding, Writer& to);
std::optional<CodecSpec> read_coding(Reader& from);

// Completes what may be left out and throws a usage error for what the `ranks` of the process set
// cannot do in a job of `size` ranks.
void settle(Submission& submission, const std::vector<int>& ranks, int size);

}  // namespace qsgd
