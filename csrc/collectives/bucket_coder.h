// An average of one bucket of gradients over ranks whose messages somebody else carries: each rank
// sends every owner its codes of the owner's elements; the owner sums them in rank order and sends
// its codes of the mean to all. Tensors without a code travel with them as they are.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "collectives/bucket_part.h"

namespace qsgd {

// What a BucketCoder is told of a tensor.
struct BucketTensor {
  size_t at;  // of its first element in the bucket
  size_t count;
  uint32_t id;                    // keys the noise and rotates the cut
  std::optional<CodecSpec> spec;  // nothing: it travels as it is
  float* residual = nullptr;      // these two as in ReduceTensor
  float* owner_residual = nullptr;
};

// The elements that this rank owns of a tensor, whose sums it codes: the first, and that after the
// last.
std::pair<size_t, size_t> owned_elements(size_t count, const CodecSpec& spec, uint32_t id, int size,
                                         int rank);

// A reduction goes begin(); then for each wave encode(), reduce() and decode(), in this order. One
// reduction at a time, on one thread.
class BucketCoder {
 public:
  // `limit` bounds the elements of a message; 0 makes one wave. Throws a usage error for a type
  // that is not floating. `workers`, or null, must outlive this.
  BucketCoder(const std::vector<BucketTensor>& tensors, DType dtype, uint64_t seed, int rank,
              int size, size_t limit, Workers* workers);

  size_t waves() const { return waves_; }
  // Of a wave's message about the owner's elements, to it or from it.
  size_t bytes(size_t wave, int owner) const;

  // Takes the bucket and the number of earlier reductions of each tensor.
  void begin(void* bucket, const std::vector<uint32_t>& steps);
  // Writes the messages to all other ranks, one behind the other in rank order.
  void encode(size_t wave, uint8_t* messages);
  // Takes the messages of all other ranks likewise; writes the mean to the bucket, and its message.
  void reduce(size_t wave, const uint8_t* messages, uint8_t* result);
  // Takes the results of all ranks, that of rank r at r * stride, and writes them to the bucket.
  void decode(size_t wave, const uint8_t* results, size_t stride);
  // Of a sample of the codes that this rank has made since begin().
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
