// What the reductions share: the tensors, the operation, and arithmetic on typed buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "quant/codec.h"
#include "transport/transport.h"

namespace qsgd {

// Adasum is no operation on elements: it has an allreduce of its own (adasum.h).
enum class ReduceOp : uint8_t { kSum, kAverage, kMin, kMax, kProduct, kAdasum };
constexpr int kReduceOps = 6;
const char* describe(ReduceOp op);

class Place;  // collectives/segment_coder.h

// One tensor of a fused reduction. `in` may equal `out`.
struct ReduceTensor {
  const void* in;
  void* out;
  size_t count;
  uint32_t id;          // hash of the name: keys the noise and rotates the cut
  uint32_t step;        // how often this name was reduced before
  uint64_t first = 0;   // place of in[0] in the named tensor, a multiple of the bucket
  CodecSpec spec = {};  // how a compressed reduction codes it, each tensor in its own way
  // Error feedback: what coding has left unsent, added to what is sent next. One float32 per
  // element for this rank's own codes, one per element of owned() for the sums that it codes, of
  // which its own input is a part uncoded: there `residual` is zero, and is not looked at.
  float* residual = nullptr;
  float* owner_residual = nullptr;
  // Where the memory above is, if not the processor's; only for what a SegmentCoder does. The same
  // for all tensors of a reduction.
  Place* place = nullptr;
  // Filled in for floating types: was this rank's input free of NaN and Inf, and the result? The
  // second is the same on every rank.
  bool input_finite = true;
  bool result_finite = true;
  // Of a sample of what this rank coded: squared error and squared magnitude. NMSE is their ratio.
  bool judged = true;  // whether they are wanted
  double coding_error = 0;
  double coded_energy = 0;
  // Filled in where the length of codes varies: elements that this rank coded, and bytes they took.
  size_t coded_count = 0;
  size_t coded_bytes = 0;
  // Filled in: time that this rank's thread spent coding, adding and decoding it.
  double coding_s = 0;
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

// to[i] = (a[i] + b[i]) * by, bit for bit as reduce_into() and scale_copy() would make it. Returns
// whether all are finite.
bool add_scaled(float* to, const float* a, const float* b, size_t count, float by);

// True when no element is NaN or Inf; always so for integers.
bool all_finite(const void* x, size_t count, DType dtype);

}  // namespace qsgd
