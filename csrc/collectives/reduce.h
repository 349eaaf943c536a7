// Common parts of the reductions: tensors, operation, and arithmetic on typed buffers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "quant/codec.h"
#include "transport/transport.h"

namespace qsgd {

// Adasum is not elementwise: it has a separate allreduce (adasum.h).
enum class ReduceOp : uint8_t { kSum, kAverage, kMin, kMax, kProduct, kAdasum };
constexpr int kReduceOps = 6;
const char* describe(ReduceOp op);

class Place;  // collectives/segment_coder.h

// One tensor of a fused reduction. `in` may equal `out`.
struct ReduceTensor {
  const void* in;
  void* out;
  size_t count;
  uint32_t id;          // hash of the name: keys the noise and rotates the partition
  uint32_t step;        // how often this name was reduced before
  uint64_t first = 0;   // position of in[0] in the named tensor, a multiple of the bucket
  CodecSpec spec = {};  // code of this tensor, for compressed reductions
  // Error feedback: coding errors, added to what is sent next. `residual` has one float32 per
  // element, for this rank's own codes. `owner_residual` has one per element of owned(), for the
  // sums that this rank codes; these include its own input uncoded, so `residual` is zero there,
  // and is not read.
  float* residual = nullptr;
  float* owner_residual = nullptr;
  // The place of the memory above, if not the host; supported only through a SegmentCoder. Equal
  // for all tensors of a reduction.
  Place* place = nullptr;
  // Outputs for floating types: whether this rank's input and the result were finite. The second is
  // equal on all ranks.
  bool input_finite = true;
  bool result_finite = true;
  // Outputs: squared error and squared magnitude of a sample of this rank's codes. NMSE is their
  // ratio.
  bool judged = true;  // whether to compute them
  double coding_error = 0;
  double coded_energy = 0;
  // Outputs for variable-length codes: elements coded by this rank, and bytes of their codes.
  size_t coded_count = 0;
  size_t coded_bytes = 0;
  // Output: time that this rank's thread spent coding, adding and decoding.
  double coding_s = 0;
};

struct ReduceArgs {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1;   // factor of each input
  double postscale = 1;  // factor of the result
};

// into[i] = op(from[i], into[i]).
void reduce_into(void* into, const void* from, size_t count, DType dtype, ReduceOp op);

// to[i] = from[i] * factor / divisor; integers are divided first, rounding towards zero. Returns
// whether all results are finite (true for integers).
bool scale_copy(void* to, const void* from, size_t count, DType dtype, double factor, int divisor);

// to[i] = (a[i] + b[i]) * by, with the bits of reduce_into() and scale_copy(). Returns whether all
// are finite.
bool add_scaled(float* to, const float* a, const float* b, size_t count, float by);

// Whether no element is NaN or Inf; true for integers.
bool all_finite(const void* x, size_t count, DType dtype);

}  // namespace qsgd
