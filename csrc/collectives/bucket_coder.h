// Average of one bucket of gradients, with messages transferred by the caller: each rank sends
// every owner its codes of the owner's elements; the owner sums them in rank order and sends its
// codes of the mean to all. Tensors without a code are sent uncoded in the same messages.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "collectives/bucket_part.h"

namespace qsgd {

// Description of a tensor for a BucketCoder.
struct BucketTensor {
  size_t at;  // first element, in the bucket
  size_t count;
  uint32_t id;                    // keys the noise and rotates the partition
  std::optional<CodecSpec> spec;  // empty: not coded
  float* residual = nullptr;      // these two as in ReduceTensor
  float* owner_residual = nullptr;
};

// The elements of a tensor that this rank owns, whose sums it codes: the first, and the one after
// the last.
std::pair<size_t, size_t> owned_elements(size_t count, const CodecSpec& spec, uint32_t id, int size,
                                         int rank);

// A reduction calls begin(); then for each wave encode(), reduce() and decode(), in this order. One
// reduction at a time, on one thread.
class BucketCoder {
 public:
  // `limit` is the maximum number of elements of a message; 0: one wave. Throws a usage error if
  // the type is not floating. `workers`, or null, must outlive this.
  BucketCoder(const std::vector<BucketTensor>& tensors, DType dtype, uint64_t seed, int rank,
              int size, size_t limit, Workers* workers);

  size_t waves() const { return waves_; }
  // Size of a wave's message with the owner's elements, to or from the owner.
  size_t bytes(size_t wave, int owner) const;

  // Sets the bucket's memory, and the number of earlier reductions of each tensor.
  void begin(void* bucket, const std::vector<uint32_t>& steps);
  // Writes the messages to all other ranks, concatenated in rank order.
  void encode(size_t wave, uint8_t* messages);
  // Reads the messages of all other ranks, in the same layout; writes the mean to the bucket, and
  // to its message.
  void reduce(size_t wave, const uint8_t* messages, uint8_t* result);
  // Reads the results of all ranks, rank r's at r * stride, and writes them to the bucket.
  void decode(size_t wave, const uint8_t* results, size_t stride);
  // Coding error of a sample of this rank's codes since begin().
  Quality quality() const;

 private:
  template <class Use>
  void each_part(size_t wave, int owner, const Use& use);

  std::vector<std::unique_ptr<BucketPart>> parts_;
  const size_t tensors_;
  const int rank_;
  const int size_;
  size_t waves_ = 0;
};

}  // namespace qsgd
