// The tensors of a bucket that are coded alike, for a reduction with messages transferred by the
// caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/floats.h"
#include "collectives/segment_coder.h"

namespace qsgd {

// A tensor of the part: its position in the bucket, and its index among the bucket's tensors.
struct BucketPlace {
  size_t at;  // first element
  size_t index;
};

// An owner's elements are sent in waves(owner) messages; in further waves its message is empty.
class BucketPart {
 public:
  BucketPart(const BucketPart&) = delete;
  BucketPart& operator=(const BucketPart&) = delete;
  virtual ~BucketPart() = default;

  size_t waves(int owner) const { return chunks_[static_cast<size_t>(owner)].size(); }
  size_t bytes(size_t wave, int owner) const {
    return wave < waves(owner) ? message_bytes(segment(wave, owner)) : 0;
  }
  // Sets the bucket's memory, and how often each tensor was reduced before.
  virtual void begin(char* bucket, const std::vector<uint32_t>& steps) = 0;
  // As a worker: writes this rank's message to an owner.
  virtual void encode(size_t wave, int owner, uint8_t* message) = 0;
  // As the owner: writes the mean to the bucket, and to the message for the others. `messages` are
  // by rank, with kOwn for this one.
  virtual void reduce(size_t wave, const Terms& messages, uint8_t* result) = 0;
  // Writes an owner's result to the bucket.
  virtual void decode(size_t wave, int owner, const uint8_t* message) = 0;
  // Coding error of this rank's codes since begin().
  virtual Quality quality() const { return {}; }

 protected:
  BucketPart(std::vector<BucketPlace> places, DType dtype, int rank, std::vector<Chunk> chunks)
      : places_(std::move(places)),
        element_(facts(dtype).size),
        rank_(rank),
        chunks_(std::move(chunks)) {}

  virtual size_t message_bytes(const Segment& segment) const = 0;
  const Segment& segment(size_t wave, int owner) const {
    return chunks_[static_cast<size_t>(owner)][wave];
  }

  const std::vector<BucketPlace> places_;
  const size_t element_;
  const int rank_;
  const std::vector<Chunk> chunks_;
};

// Both take tensors without memory, which begin() sets. `limit`: maximum number of elements of a
// message.

// Tensors that share a code.
std::unique_ptr<BucketPart> coded_part(std::vector<ReduceTensor> tensors,
                                       std::vector<BucketPlace> places, const ReduceArgs& args,
                                       uint64_t seed, int rank, int size, size_t limit,
                                       Workers* workers);

// Tensors that are not coded, whose spec is plain_cut(): summed as by an exact allreduce, or in
// float32 and rank order if their type has less precision.
std::unique_ptr<BucketPart> plain_part(const std::vector<ReduceTensor>& tensors,
                                       std::vector<BucketPlace> places, DType dtype, int rank,
                                       int size, size_t limit);

// Partition of tensors without a code: between tiles, so that messages stay aligned.
CodecSpec plain_cut();

}  // namespace qsgd
