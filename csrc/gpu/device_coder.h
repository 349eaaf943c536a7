// The coder of tensors in a device's memory. Messages are copied to and from the host's pinned
// memory; what is coded, summed and decoded never leaves the device.
#pragma once

#include <functional>
#include <vector>

#include "gpu/device.h"

namespace qsgd::gpu {

class DeviceCoder final : public SegmentCoder {
 public:
  // Every tensor's spec is one that the device codes.
  DeviceCoder(Device& device, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
              uint64_t seed, int rank, int size);

  void contribute(const Segment& segment, const Terms& terms, uint8_t* message) override;
  void conclude(const Segment& segment, const Terms& terms, uint8_t* message) override;
  // Nothing that runs on devices needs it: throws.
  void deliver(const Segment& segment, const Terms& terms) override;
  void accept(const Segment& segment, const uint8_t* message) override;
  void finish() override;
  size_t scratch_bytes() const override;

 private:
  // Pieces of a segment that one launch takes: of one code, and of tensors in one step.
  struct Batch {
    CodecSpec spec;
    uint32_t step = 0;
    std::vector<gpu::Piece> pieces;
    std::vector<const qsgd::Piece*> of;
  };
  // Which memory the pieces speak of: the input with the rank's residual, the input as a part of a
  // sum whose code may be kept by a residual, or the output.
  enum class Side : uint8_t { kInput, kSumOfWorker, kSumOfOwner, kOutput };

  std::vector<Batch> batches(const Segment& segment, Side side) const;
  gpu::Piece piece(const qsgd::Piece& of, Side side) const;
  Run run(const Batch& batch);
  Draw draw(const Batch& batch, Phase phase) const;
  uint8_t* scratch(DeviceMemory& memory, size_t size_bytes);
  Addends upload(const Segment& segment, const Terms& terms, float factor);
  void encode_sum(const Segment& segment, const Terms& terms, Side side, float factor, Phase phase,
                  uint8_t* message);
  void judge(const std::vector<Batch>& batches, const uint8_t* message);
  void decode(const Segment& segment, const uint8_t* message);
  void note_inputs(const Segment& segment, const uint8_t* message);
  void note_results(const Segment& segment, const uint8_t* message);
  bool is_finite(const void* memory, const qsgd::Piece& piece);
  void timed(const Segment& segment, const std::function<void()>& work);

  Device& device_;
  std::vector<ReduceTensor>& tensors_;
  const DType dtype_;
  const uint64_t seed_;
  const int rank_;
  const float scale_;
  const char* first_in_ = nullptr;  // the lowest address, from which the kernels count
  char* first_out_ = nullptr;
  DeviceMemory made_;      // a message of this rank's
  DeviceMemory received_;  // messages of others
  Device::PinnedMemory judged_;
  std::vector<const qsgd::Piece*> judged_pieces_;
};

}  // namespace qsgd::gpu
