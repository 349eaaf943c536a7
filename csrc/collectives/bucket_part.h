// The tensors of a bucket that are coded alike, for a reduction with messages transferred by the
// caller.
#pragma once

#include <cstddef>
#include <cstdint>
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
  BucketPart() = default;
  BucketPart(const BucketPart&) = delete;
  BucketPart& operator=(const BucketPart&) = delete;
  virtual ~BucketPart() = default;

  // Sets the bucket's memory, and how often each tensor was reduced before.
  virtual void begin(char* bucket, const std::vector<uint32_t>& steps) = 0;
  virtual size_t waves(int owner) const = 0;
  virtual size_t bytes(size_t wave, int owner) const = 0;
  // As a worker: writes this rank's message to an owner.
  virtual void encode(size_t wave, int owner, uint8_t* message) = 0;
  // As the owner: writes the mean to the bucket, and to the message for the others. `messages` are
  // by rank, with kOwn for this one.
  virtual void reduce(size_t wave, const Terms& messages, uint8_t* result) = 0;
  // Writes an owner's result to the bucket.
  virtual void decode(size_t wave, int owner, const uint8_t* message) = 0;
  // Coding error of this rank's codes since begin().
  virtual Quality quality() const { return {}; }
};

}  // namespace qsgd
