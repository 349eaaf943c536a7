// Extends algorithms for a power of two of ranks to any number: each surplus rank sends its values
// to a partner and waits for the result.
#pragma once

#include <cstddef>

#include "collectives/reduce.h"
#include "transport/transport.h"

namespace qsgd {

// The largest power of two that is at most `size`.
inline int fold_ranks(int size) {
  int ranks = 1;
  while (2 * ranks <= size) ranks *= 2;
  return ranks;
}

// Messages in sequence that surplus ranks add to an algorithm.
inline int fold_messages(int size) { return fold_ranks(size) == size ? 0 : 2; }

class Fold {
 public:
  explicit Fold(Transport& transport)
      : transport_(transport), ranks_(fold_ranks(transport.size())) {}

  // The power of two; ranks from here on are surplus.
  int ranks() const { return ranks_; }
  bool surplus() const { return transport_.rank() >= ranks_; }
  // This rank's partner; beyond the last rank if it has none.
  int partner() const {
    return surplus() ? transport_.rank() - ranks_ : transport_.rank() + ranks_;
  }

  // Adds the surplus ranks' values to their partners'.
  void in(void* data, size_t count, DType dtype, ReduceOp op);
  // Sends the result to the surplus ranks.
  void out(void* data, size_t size_bytes);

 private:
  Transport& transport_;
  const int ranks_;
};

// own = op of both, the lower rank's operand first, so that both sides of an exchange get the same
// bits, also for NaN. Overwrites `other`.
void reduce_ordered(void* own, void* other, size_t count, DType dtype, ReduceOp op,
                    bool other_is_lower);

}  // namespace qsgd
