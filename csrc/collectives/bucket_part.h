// Those tensors of a bucket that travel alike, in a reduction whose messages somebody else carries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/floats.h"
#include "collectives/segment_coder.h"

namespace qsgd {

// A tensor of the part: where it lies in the bucket, and which of the bucket's tensors it is.
struct BucketPlace {
  size_t at;  // first element
  size_t index;
};

// An owner's elements go in as many messages as there are waves for it; a wave that has none of
// them has no bytes.
class BucketPart {
 public:
  BucketPart() = default;
  BucketPart(const BucketPart&) = delete;
  BucketPart& operator=(const BucketPart&) = delete;
  virtual ~BucketPart() = default;

  // Takes the bucket in which this reduction's tensors lie, and how often each was reduced before.
  virtual void begin(char* bucket, const std::vector<uint32_t>& steps) = 0;
  virtual size_t waves(int owner) const = 0;
  virtual size_t bytes(size_t wave, int owner) const = 0;
  // As a worker: writes this rank's message to an owner.
  virtual void encode(size_t wave, int owner, uint8_t* message) = 0;
  // As the owner: writes the mean to the bucket, and the message that tells the others. `messages`
  // are by rank, with kOwn for this one.
  virtual void reduce(size_t wave, const Terms& messages, uint8_t* result) = 0;
  // Writes an owner's result to the bucket.
  virtual void decode(size_t wave, int owner, const uint8_t* message) = 0;
  // Of the codes that this rank has made since begin().
  virtual Quality quality() const { return {}; }
};

}  // namespace qsgd
