// Instructions of rank 0 to the others.
#pragma once

#include <string>
#include <vector>

#include "collectives/allreduce.h"
#include "common/bytes.h"
#include "common/error.h"
#include "engine/books.h"
#include "engine/operation.h"
#include "engine/rank_set.h"
#include "engine/tuning.h"
#include "quant/codec.h"

namespace qsgd {

// Operations that the ranks of a set must execute together, in this order; or that all must fail.
struct Response {
  int32_t set = 0;
  Fault fault;
  std::vector<std::string> names;
  bool lasting = false;  // the names are used in every step
  // By name; empty if all are uncoded. May have more bits than requested.
  std::vector<CodecSpec> codings;
  Algorithm algorithm = Algorithm::kAuto;  // of reductions
  SegmentSize segment;                     // elements per message of a compressed reduction
  std::vector<int64_t> rows;               // of an allgather: number from each rank
  int64_t value = 0;                       // result of operations that return a number
  bool grouped = false;                    // complete together; if one fails, all do
  bool group_goes_on = false;              // and together with those of the next response
  bool on_device = false;  // all ranks that have submitted them have them on devices
  // Used on rank 0 only: number of elements in total, and the receiving ranks.
  size_t count = 0;
  Members recipients;
  // By name, if ranks take part that have joined, or if the operation changes sets.
  std::vector<OperationPtr> operations;

  // Sender and receiver use one book for all responses, in the same order.
  void write(Writer& to, NameBook& book) const;
  static Response read(Reader& from, NameBook& book);
};

}  // namespace qsgd
