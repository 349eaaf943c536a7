// Sum of the ranks' addends in the order of recursive doubling: ranks from the largest power of two
// on are added to those from 0 on, then neighbours, then pairs of neighbours and so on. Every rank
// that sums in this order gets the same bits, whether it has all addends or each step of the tree
// is an exchange. Errors grow with the height of the tree, not with the number of ranks.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "collectives/reduce.h"

namespace qsgd {

// Works block by block, so that partial sums stay in the L1 cache.
class TreeSum {
 public:
  TreeSum(DType dtype, ReduceOp op, int ranks)
      : element_(facts(dtype).size), dtype_(dtype), op_(op), ranks_(ranks) {
    for (; 2 * whole_ <= ranks; ++height_) whole_ *= 2;
  }

  // addend(rank) returns the address of that rank's values; use(offset, count, block) gets each
  // sum.
  template <class Addend, class Use>
  void run(size_t count, Addend&& addend, Use&& use) {
    // Allocated at the first sum: some objects never sum. Not make_unique, which would write zeros.
    if (!blocks_) blocks_.reset(new Block[height_]);
    const size_t most = kBlockBytes / element_;
    for (size_t at = 0; at < count; at += most) {
      const size_t part = std::min(most, count - at);
      sum(blocks_.get(), 0, whole_, part, [&](int rank) { return addend(rank) + at * element_; });
      use(at, part, static_cast<void*>(blocks_[0].bytes));
    }
  }

 private:
  static constexpr size_t kBlockBytes = size_t{8} << 10;
  struct Block {
    alignas(64) char bytes[kBlockBytes];
  };

  // Sums the ranks [first, first + span), and the surplus ranks added to them, into the first
  // block.
  template <class Addend>
  void sum(Block* block, int first, int span, size_t count, const Addend& addend) {
    if (span == 1) {
      std::memcpy(block->bytes, addend(first), count * element_);
      if (has_surplus(first)) add(block, addend(first + whole_), count);
      return;
    }
    const int second = first + span / 2;
    sum(block, first, span / 2, count, addend);
    if (span == 2 && !has_surplus(second)) return add(block, addend(second), count);
    sum(block + 1, second, span / 2, count, addend);
    add(block, block[1].bytes, count);
  }

  bool has_surplus(int rank) const { return rank + whole_ < ranks_; }
  void add(Block* block, const char* addend, size_t count) const {
    reduce_into(block->bytes, addend, count, dtype_, op_);
  }

  const size_t element_;
  const DType dtype_;
  const ReduceOp op_;
  const int ranks_;
  int whole_ = 1;      // the largest power of two up to the number of ranks
  size_t height_ = 1;  // of the tree, in blocks
  std::unique_ptr<Block[]> blocks_;
};

}  // namespace qsgd
