// A rank's arithmetic on the segments of a compressed collective: code, sum, decode, with error
// feedback and quality, where the tensors lie.
#pragma once

#include <memory>
#include <vector>

#include "collectives/segments.h"
#include "common/workers.h"

namespace qsgd {

// What to sum, in this order: messages of the segment, and kOwn for this rank's own input, which is
// taken as it is, without coding.
using Terms = std::vector<const uint8_t*>;
constexpr const uint8_t* kOwn = nullptr;

// Messages are in memory that the processor reads and that MPI sends. They may be used again after
// each call.
class SegmentCoder {
 public:
  SegmentCoder() = default;
  virtual ~SegmentCoder() = default;
  SegmentCoder(const SegmentCoder&) = delete;
  SegmentCoder& operator=(const SegmentCoder&) = delete;

  // As a worker: codes the sum, which holds the rank's own input, for an owner to add to others'.
  virtual void contribute(const Segment& segment, const Terms& terms, uint8_t* message) = 0;
  // As the owner: scales the complete sum, codes it as the result, and decodes it into `out`.
  virtual void conclude(const Segment& segment, const Terms& terms, uint8_t* message) = 0;
  // Writes the scaled sum to `out` without coding it once more. With kOwn among the terms, which is
  // for a rank that is alone, it sends off all residuals with it.
  virtual void deliver(const Segment& segment, const Terms& terms) = 0;
  // Writes an owner's result to `out`.
  virtual void accept(const Segment& segment, const uint8_t* message) = 0;
  // Once the last segment is written: the results are in `out`.
  virtual void finish() {}
  // Memory taken beyond the caller's and the messages.
  virtual size_t scratch_bytes() const = 0;
  // Refuses a message that is not the segment's.
  void verify(const Segment& segment, const uint8_t* message, int sender) const {
    qsgd::verify(message, segment.bytes, segment.kind, segment.count, sender);
  }
};

// Throws a usage error for what cannot be compressed: integers, minima, maxima, products.
void check_compressible(const ReduceArgs& args);

// What a sum is multiplied by to be the result.
float scale_of(const ReduceArgs& args, int size);

// The coder of tensors that all lie in one place.
std::unique_ptr<SegmentCoder> make_coder(std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                                         uint64_t seed, int rank, int size, Workers* workers);

// Time that tensors of a segment took is shared out by their sizes.
void note_coding(std::vector<ReduceTensor>& tensors, const Segment& segment, double seconds);

// Memory that the processor does not work on: a device's.
class Place {
 public:
  virtual ~Place() = default;
  virtual std::unique_ptr<SegmentCoder> make_coder(std::vector<ReduceTensor>& tensors,
                                                   const ReduceArgs& args, uint64_t seed, int rank,
                                                   int size) = 0;
  // Memory for messages, which the device copies at its full speed.
  virtual std::shared_ptr<uint8_t> take_message(size_t size_bytes) = 0;
};

}  // namespace qsgd
