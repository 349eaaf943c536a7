// Coder of tensors in device memory. Messages are copied to and from pinned host memory; elements,
// sums and results stay on the device.
#pragma once

#include <functional>
#include <vector>

#include "gpu/device.h"

namespace qsgd::gpu {

class DeviceCoder final : public SegmentCoder {
 public:
  // Every tensor's code must be supported by the device.
  DeviceCoder(Device& device, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
              uint64_t seed, int rank, int size);

  void contribute(const Segment& segment, const Terms& terms, uint8_t* message) override;
  void conclude(const Segment& segment, const Terms& terms, uint8_t* message) override;
  // Throws: no algorithm for devices needs it.
  void deliver(const Segment& segment, const Terms& terms) override;
  void accept(const Segment& segment, const uint8_t* message) override;
  void finish() override;
  size_t scratch_bytes() const override;

 private:
  // Pieces of a segment for one launch: equal code and step.
  struct Batch {
    CodecSpec spec;
    uint32_t step = 0;
    std::vector<gpu::Piece> pieces;
    std::vector<const qsgd::Piece*> of;
  };
  // Memory of the pieces: the input with the worker's residual, the input as addend of a sum whose
  // coding error goes to the worker's or the owner's residual, or the output.
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
  const char* first_in_ = nullptr;  // lowest address, to which the kernels' offsets refer
  char* first_out_ = nullptr;
  DeviceMemory made_;      // a message of this rank
  DeviceMemory received_;  // messages of other ranks
  Device::PinnedMemory judged_;
  std::vector<const qsgd::Piece*> judged_pieces_;
};

}  // namespace qsgd::gpu
