// Coder of tensors in device memory. Messages are copied to and from pinned host memory; elements,
// sums and results stay on the device.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "common/error.h"
#include "gpu/bucket.h"
#include "gpu/device.h"
#include "quant/philox.h"

namespace qsgd::gpu {
namespace {

constexpr uint32_t kSampleEvery = 16;  // buckets; as on the host
constexpr size_t kAlignment = 256;     // of messages in device memory

size_t aligned(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

// Above this value, an element of the type may be Inf although the scale of its bucket is finite.
float largest_sure(const CodecSpec& spec, DType dtype) {
  constexpr float kMostOfFloat16 = 65504;
  constexpr float kMostOfBFloat16 = 0x1.fep127f;
  constexpr float kOfRotation = 1024;  // factor by which rotated elements may exceed the scale
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) return HUGE_VALF;
  const float most = dtype == DType::kFloat16 ? kMostOfFloat16 : kMostOfBFloat16;
  return spec.scheme == Scheme::kEden ? most / kOfRotation : most;
}

// Whether all scales of a piece are finite, and whether any exceeds `most`.
enum class Scales : uint8_t { kSure, kLarge, kNotFinite };
Scales look_at(const uint8_t* message, const qsgd::Piece& piece, const CodecSpec& spec,
               float most) {
  const auto* const scales = reinterpret_cast<const float*>(message + piece.scales_at);
  Scales found = Scales::kSure;
  for (size_t i = 0; i < spec.scales(piece.count); ++i) {
    if (!std::isfinite(scales[i])) return Scales::kNotFinite;
    if (std::abs(scales[i]) > most) found = Scales::kLarge;
  }
  return found;
}

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

DeviceCoder::DeviceCoder(Device& device, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                         uint64_t seed, int rank, int size)
    : device_(device),
      tensors_(tensors),
      dtype_(args.dtype),
      seed_(seed),
      rank_(rank),
      scale_(scale_of(args, size)) {
  check_compressible(args);
  for (const ReduceTensor& tensor : tensors) {
    check(tensor.spec);
    if (tensor.count == 0) continue;
    const auto* const in = static_cast<const char*>(tensor.in);
    auto* const out = static_cast<char*>(tensor.out);
    if (first_in_ == nullptr || in < first_in_) first_in_ = in;
    if (first_out_ == nullptr || out < first_out_) first_out_ = out;
  }
}

size_t DeviceCoder::scratch_bytes() const { return made_.size_bytes() + received_.size_bytes(); }

gpu::Piece DeviceCoder::piece(const qsgd::Piece& of, Side side) const {
  const ReduceTensor& tensor = tensors_[of.tensor];
  const size_t element = facts(dtype_).size;
  const char* const base = side == Side::kOutput ? first_out_ : first_in_;
  const auto* const data = static_cast<const char*>(side == Side::kOutput ? tensor.out : tensor.in);
  gpu::Piece piece{};
  piece.at = static_cast<uint64_t>(data - base) / element + of.begin;
  piece.count = of.count;
  piece.first = tensor.first + of.begin;
  piece.tensor = Philox::mix(seed_, tensor.id);
  piece.scales_at = of.scales_at;
  piece.codes_at = of.codes_at;
  const auto address = [](const float* at) { return reinterpret_cast<uint64_t>(at); };
  if (tensor.residual != nullptr) {
    if (side == Side::kInput) piece.residual = address(tensor.residual + of.begin);
    if (side == Side::kSumOfWorker) piece.owner_residual = address(tensor.residual + of.begin);
  }
  if (side == Side::kSumOfOwner && tensor.owner_residual != nullptr) {
    piece.owner_residual = address(tensor.owner_residual + of.place);
  }
  return piece;
}

std::vector<DeviceCoder::Batch> DeviceCoder::batches(const Segment& segment, Side side) const {
  std::vector<Batch> batches;
  for (const qsgd::Piece& of : segment.pieces) {
    if (of.count == 0) continue;
    const ReduceTensor& tensor = tensors_[of.tensor];
    const auto alike = std::find_if(batches.begin(), batches.end(), [&](const Batch& batch) {
      return batch.step == tensor.step && batch.spec == tensor.spec;
    });
    Batch& batch = alike != batches.end()
                       ? *alike
                       : batches.emplace_back(Batch{tensor.spec, tensor.step, {}, {}});
    gpu::Piece piece = this->piece(of, side);
    piece.first_bucket = buckets(batch.pieces, batch.spec);
    batch.pieces.push_back(piece);
    batch.of.push_back(&of);
  }
  return batches;
}

Run DeviceCoder::run(const Batch& batch) {
  Run run{};
  run.dtype = dtype_;
  run.spec = batch.spec;
  run.pieces.size = static_cast<uint32_t>(batch.pieces.size());
  run.pieces.buckets = buckets(batch.pieces, batch.spec);
  if (batch.pieces.size() == 1) {
    run.pieces.only = batch.pieces.front();
    return run;
  }
  run.pieces.list = device_.upload(batch.pieces);
  return run;
}

Draw DeviceCoder::draw(const Batch& batch, Phase phase) const {
  return {batch.step, static_cast<uint32_t>(rank_) << 4 | static_cast<uint32_t>(phase), nullptr};
}

uint8_t* DeviceCoder::scratch(DeviceMemory& memory, size_t size_bytes) {
  if (memory.size_bytes() < size_bytes) {
    memory = DeviceMemory(device_, size_bytes);
    device_.clear(memory.data(), size_bytes);  // padding of a message must not leak old data
  }
  return memory.data();
}

Addends DeviceCoder::upload(const Segment& segment, const Terms& terms, float factor) {
  Addends addends{};
  addends.stride = aligned(segment.bytes);
  addends.ranks = static_cast<int>(terms.size());
  addends.own = -1;
  addends.factor = factor;
  uint8_t* const messages = scratch(received_, addends.stride * terms.size());
  addends.messages = messages;
  for (size_t t = 0; t < terms.size(); ++t) {
    if (terms[t] == kOwn) {
      addends.own = static_cast<int>(t);
    } else {
      device_.copy(messages + addends.stride * t, terms[t], segment.bytes);
    }
  }
  return addends;
}

// Codes a sum into `made_`, then copies it to the message.
void DeviceCoder::encode_sum(const Segment& segment, const Terms& terms, Side side, float factor,
                             Phase phase, uint8_t* message) {
  const Addends addends = upload(segment, terms, factor);
  uint8_t* const made = scratch(made_, segment.bytes);
  for (const Batch& batch : batches(segment, side)) {
    device_.require(device_.library().sum_encode(addends, first_in_, run(batch), draw(batch, phase),
                                                 made, device_.stream()));
  }
  device_.copy(message, made, segment.bytes);
}

void DeviceCoder::timed(const Segment& segment, const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  note_coding(tensors_, segment, spent.count());
}

void DeviceCoder::contribute(const Segment& segment, const Terms& terms, uint8_t* message) {
  timed(segment, [&] {
    if (terms.size() == 1 && terms.front() == kOwn) {
      // The kernel writes to host memory directly: a copy after it would double the time.
      const std::vector<Batch> all = batches(segment, Side::kInput);
      for (const Batch& batch : all) {
        device_.require(device_.library().encode(
            first_in_, run(batch), draw(batch, Phase::kScatter), message, device_.stream()));
      }
      judge(all, message);
    } else {
      encode_sum(segment, terms, Side::kSumOfWorker, 1, Phase::kScatter, message);
    }
    device_.synchronize();
    note_inputs(segment, message);
  });
  seal(message, segment.bytes, segment.kind, segment.count);
}

void DeviceCoder::conclude(const Segment& segment, const Terms& terms, uint8_t* message) {
  timed(segment, [&] {
    encode_sum(segment, terms, Side::kSumOfOwner, scale_, Phase::kGather, message);
    device_.synchronize();
    note_inputs(segment, message);  // before the results overwrite them
    decode(segment, made_.data());
    note_results(segment, message);
  });
  seal(message, segment.bytes, segment.kind, segment.count);
}

void DeviceCoder::deliver(const Segment&, const Terms&) {
  throw internal_error("a collective that does not support devices was given tensors on a device");
}

void DeviceCoder::accept(const Segment& segment, const uint8_t* message) {
  timed(segment, [&] {
    uint8_t* const received = scratch(received_, segment.bytes);
    device_.copy(received, message, segment.bytes);
    decode(segment, received);
    device_.synchronize();
    note_results(segment, message);
  });
}

void DeviceCoder::finish() { device_.synchronize(); }

void DeviceCoder::decode(const Segment& segment, const uint8_t* message) {
  for (const Batch& batch : batches(segment, Side::kOutput)) {
    device_.require(device_.library().decode(message, run(batch), first_out_, device_.stream()));
  }
}

// Queues the error sample of tensors that request it.
void DeviceCoder::judge(const std::vector<Batch>& batches, const uint8_t* message) {
  judged_pieces_.clear();
  std::vector<Batch> wanted;
  size_t count = 0;
  for (const Batch& batch : batches) {
    Batch& some = wanted.emplace_back(Batch{batch.spec, batch.step, {}, {}});
    for (size_t i = 0; i < batch.pieces.size(); ++i) {
      if (!tensors_[batch.of[i]->tensor].judged) continue;
      gpu::Piece piece = batch.pieces[i];
      piece.first_bucket = buckets(some.pieces, some.spec);
      some.pieces.push_back(piece);
      judged_pieces_.push_back(batch.of[i]);
    }
    count += some.pieces.size();
  }
  if (count == 0) return;
  DeviceMemory sums(device_, count * sizeof(Judged));
  device_.clear(sums.data(), sums.size_bytes());
  auto* to = reinterpret_cast<Judged*>(sums.data());
  for (const Batch& batch : wanted) {
    if (batch.pieces.empty()) continue;
    device_.require(device_.library().judge(first_in_, message, run(batch), kSampleEvery, to,
                                            device_.stream()));
    to += batch.pieces.size();
  }
  judged_ = device_.take_pinned(sums.size_bytes());
  device_.copy(judged_.get(), sums.data(), sums.size_bytes());
  device_.keep(std::move(sums));
}

// Updates this rank's inputs from the completed code of a segment. If a scale is not finite, the
// inputs themselves are checked: the sum may have overflowed, or another rank may be the origin.
void DeviceCoder::note_inputs(const Segment& segment, const uint8_t* message) {
  const auto* const sums = reinterpret_cast<const Judged*>(judged_.get());
  for (size_t i = 0; i < judged_pieces_.size(); ++i) {
    ReduceTensor& tensor = tensors_[judged_pieces_[i]->tensor];
    tensor.coding_error += sums[i].error;
    tensor.coded_energy += sums[i].energy;
  }
  judged_pieces_.clear();
  for (const qsgd::Piece& piece : segment.pieces) {
    ReduceTensor& tensor = tensors_[piece.tensor];
    if (look_at(message, piece, tensor.spec, HUGE_VALF) != Scales::kNotFinite) continue;
    tensor.input_finite &= is_finite(tensor.in, piece);
  }
}

void DeviceCoder::note_results(const Segment& segment, const uint8_t* message) {
  for (const qsgd::Piece& piece : segment.pieces) {
    ReduceTensor& tensor = tensors_[piece.tensor];
    const Scales scales = look_at(message, piece, tensor.spec, largest_sure(tensor.spec, dtype_));
    if (scales == Scales::kNotFinite) tensor.result_finite = false;
    if (scales == Scales::kLarge) tensor.result_finite &= is_finite(tensor.out, piece);
  }
}

// Copies the elements to the host; rarely needed.
bool DeviceCoder::is_finite(const void* memory, const qsgd::Piece& piece) {
  const size_t element = facts(dtype_).size;
  const Device::PinnedMemory copy = device_.take_pinned(piece.count * element);
  device_.copy(copy.get(), static_cast<const char*>(memory) + piece.begin * element,
               piece.count * element);
  device_.synchronize();
  return all_finite(copy.get(), piece.count, dtype_);
}

}  // namespace

std::unique_ptr<SegmentCoder> Device::make_coder(std::vector<ReduceTensor>& tensors,
                                                 const ReduceArgs& args, uint64_t seed, int rank,
                                                 int size) {
  return std::make_unique<DeviceCoder>(*this, tensors, args, seed, rank, size);
}

}  // namespace qsgd::gpu
