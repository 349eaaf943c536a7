// A rank's arithmetic on the segments of a compressed collective, where the tensors are: encoding,
// summing, decoding, error feedback and quality.
#pragma once

#include <memory>
#include <vector>

#include "collectives/segments.h"
#include "common/workers.h"

namespace qsgd {

// The addends of a sum, in order: messages of the segment, and kOwn for this rank's own input,
// which is added uncoded.
using Terms = std::vector<const uint8_t*>;
constexpr const uint8_t* kOwn = nullptr;

// Messages are in memory that the host can read and MPI can send. They may be reused after each
// call.
class SegmentCoder {
 public:
  SegmentCoder() = default;
  virtual ~SegmentCoder() = default;
  SegmentCoder(const SegmentCoder&) = delete;
  SegmentCoder& operator=(const SegmentCoder&) = delete;

  // As a worker: codes the sum, which includes the rank's own input, for an owner.
  virtual void contribute(const Segment& segment, const Terms& terms, uint8_t* message) = 0;
  // As the owner: scales the complete sum, codes it as the result, and decodes it to `out`.
  virtual void conclude(const Segment& segment, const Terms& terms, uint8_t* message) = 0;
  // Writes the scaled sum to `out` without coding it again. With kOwn among the terms, for a single
  // rank, it adds all residuals.
  virtual void deliver(const Segment& segment, const Terms& terms) = 0;
  // Writes an owner's result to `out`.
  virtual void accept(const Segment& segment, const uint8_t* message) = 0;
  // Called after the last segment; on return, the results are in `out`.
  virtual void finish() {}
  // Bytes allocated besides the caller's memory and the messages.
  virtual size_t scratch_bytes() const = 0;
  // Throws if a message does not match the segment.
  void verify(const Segment& segment, const uint8_t* message, int sender) const {
    qsgd::verify(message, segment.bytes, segment.kind, segment.count, sender);
  }
};

// Throws a usage error for reductions that cannot be compressed: integers, minima, maxima,
// products.
void check_compressible(const ReduceArgs& args);

// The factor from the sum to the result.
float scale_of(const ReduceArgs& args, int size);

// The coder of tensors that are all in one place.
std::unique_ptr<SegmentCoder> make_coder(std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                                         uint64_t seed, int rank, int size, Workers* workers);

// Distributes the time of a segment over its tensors in proportion to their sizes.
void note_coding(std::vector<ReduceTensor>& tensors, const Segment& segment, double seconds);

// Memory other than the host's: that of a device.
class Place {
 public:
  virtual ~Place() = default;
  virtual std::unique_ptr<SegmentCoder> make_coder(std::vector<ReduceTensor>& tensors,
                                                   const ReduceArgs& args, uint64_t seed, int rank,
                                                   int size) = 0;
  // Memory for messages, which the device copies at full speed.
  virtual std::shared_ptr<uint8_t> take_message(size_t size_bytes) = 0;
};

}  // namespace qsgd
