// What the reductions share: the tensors, the operation, and arithmetic on typed buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "transport/transport.h"

namespace qsgd {

enum class ReduceOp : uint8_t { kSum, kAverage, kMin, kMax, kProduct };

// One tensor of a fused reduction. `in` may equal `out`.
struct ReduceTensor {
  const void* in;
  void* out;
  size_t count;
  uint32_t id;    // hash of the name: keys the noise and rotates the cut
  uint32_t step;  // how often this name was reduced before
  // Filled in for floating types: was this rank's input free of NaN and Inf, and the result? The
  // second is the same on every rank.
  bool input_finite = true;
  bool result_finite = true;
};

struct ReduceArgs {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1;   // on each input
  double postscale = 1;  // on the result
};

// into[i] = op(from[i], into[i]).
void reduce_into(void* into, const void* from, size_t count, DType dtype, ReduceOp op);

// to[i] = from[i] * factor / divisor; integers divide exactly and round towards zero. Returns
// whether all results are finite (always so for integers).
bool scale_copy(void* to, const void* from, size_t count, DType dtype, double factor, int divisor);

}  // namespace qsgd
