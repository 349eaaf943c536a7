// The ranks' addends of one run of elements, summed in rank order.
#pragma once

#include <algorithm>
#include <cstring>

#include "collectives/reduce.h"

namespace qsgd {

// Works block by block, so that the sum in progress stays in the first-level cache.
class RankOrderSum {
 public:
  RankOrderSum(DType dtype, ReduceOp op) : element_(facts(dtype).size), dtype_(dtype), op_(op) {}

  // addend(rank) is where that rank's values lie; use(offset, count, block) takes each sum.
  template <class Addend, class Use>
  void run(size_t count, int ranks, Addend&& addend, Use&& use) {
    const size_t most = kBlockBytes / element_;
    for (size_t at = 0; at < count; at += most) {
      const size_t part = std::min(most, count - at);
      std::memcpy(block_, addend(0) + at * element_, part * element_);
      for (int rank = 1; rank < ranks; ++rank) {
        reduce_into(block_, addend(rank) + at * element_, part, dtype_, op_);
      }
      use(at, part, static_cast<void*>(block_));
    }
  }

 private:
  static constexpr size_t kBlockBytes = size_t{8} << 10;

  const size_t element_;
  const DType dtype_;
  const ReduceOp op_;
  alignas(64) char block_[kBlockBytes];
};

}  // namespace qsgd
