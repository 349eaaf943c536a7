// What rank 0 tells the others to do.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/allreduce.h"
#include "common/bytes.h"
#include "common/error.h"
#include "engine/books.h"
#include "engine/operation.h"
#include "engine/rank_set.h"
#include "engine/segment_size.h"
#include "quant/codec.h"

namespace qsgd {

// Operations that the ranks of a set now carry out together, in this order; or must all fail.
struct Response {
  int32_t set = 0;
  ErrorKind error = ErrorKind::kNone;
  std::string message;
  std::vector<std::string> names;
  bool lasting = false;  // the names come again
  // Of each name, or empty where all travel as they are; may have more bits than was asked for.
  std::vector<CodecSpec> codings;
  Algorithm algorithm = Algorithm::kAuto;  // of reductions
  SegmentSize segment;                     // of their messages, where they are compressed
  std::vector<int64_t> rows;               // of an allgather: what each rank brings
  int64_t value = 0;                       // the answer to what has one
  bool grouped = false;                    // they end together, if need be in failure
  bool group_goes_on = false;              // and together with those of the next response
  bool on_device = false;                  // all ranks that have them have them on devices
  // On rank 0: elements altogether, and who is told.
  size_t count = 0;
  Members recipients;
  // Of each name, where ranks take part that have joined, or learn from it who is in a set.
  std::vector<OperationPtr> operations;

  // Both ends read and write all responses with one book each, in one order.
  void write(Writer& to, NameBook& book) const;
  static Response read(Reader& from, NameBook& book);
};

}  // namespace qsgd
