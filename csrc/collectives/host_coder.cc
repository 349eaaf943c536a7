// Coder of tensors in host memory: works block by block, in the caches, on one or several threads.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>

#include "collectives/floats.h"
#include "collectives/schedule.h"
#include "collectives/segment_coder.h"
#include "common/error.h"
#include "quant/code.h"
#include "quant/convert.h"
#include "quant/kernels.h"

namespace qsgd {
namespace {

constexpr size_t kCodedBlock = 8192;  // its sum, 32 KB, fits in the L1 cache
constexpr size_t kSampleEvery = 16;   // buckets; their decoding costs about 1/16 of a decoding pass

bool takes_own(const Terms& terms) {
  return std::find(terms.begin(), terms.end(), kOwn) != terms.end();
}

class HostCoder final : public SegmentCoder {
 public:
  HostCoder(std::vector<ReduceTensor>& tensors, const ReduceArgs& args, uint64_t seed, int rank,
            int size, Workers* workers);

  void contribute(const Segment& segment, const Terms& terms, uint8_t* message) override;
  void conclude(const Segment& segment, const Terms& terms, uint8_t* message) override;
  void deliver(const Segment& segment, const Terms& terms) override;
  void accept(const Segment& segment, const uint8_t* message) override;
  size_t scratch_bytes() const override;

 private:
  // Consecutive buckets of a piece that fit in the caches.
  struct Block {
    const Piece* piece;
    size_t at;  // in the piece
    size_t count;
  };
  struct Outcome {
    bool input_finite = true;
    bool result_finite = true;
    Quality quality;
    size_t coded_count = 0, coded_bytes = 0;
  };
  // Two buffers of a block.
  struct Scratch {
    std::vector<float> sum;
    std::vector<float> other;
  };
  using Work = std::function<void(const Block&, Scratch&, Outcome&)>;

  void for_each_block(const Segment& segment, const Work& work);
  ReduceTensor& tensor_of(const Block& block) { return tensors_[block.piece->tensor]; }
  const CodecSpec& spec_of(const Block& block) const { return tensors_[block.piece->tensor].spec; }
  // Positions in a message.
  size_t scales_at(const Block& block) const;
  size_t codes_at(const Block& block) const;
  const char* input(const Block& block);
  char* output(const Block& block);
  float* residual(const Block& block);
  float* owner_residual(const Block& block);
  NoiseKey key(const ReduceTensor& tensor, Phase phase) const;

  const float* own_input(const Block& block, std::vector<float>& buffer, Outcome& outcome);
  float* sum(const Block& block, const Terms& terms, Scratch& scratch, Outcome& outcome);
  bool code(const Block& block, const void* x, DType dtype, float by, Phase phase, float* left,
            uint8_t* message, Outcome& outcome);
  bool decode_block(const Block& block, const uint8_t* message, DType dtype, void* to) const;
  Quality sample(const Block& block, const void* x, DType dtype, const float* left,
                 const uint8_t* message, std::vector<float>& buffer) const;

  std::vector<ReduceTensor>& tensors_;
  const DType dtype_;
  const uint64_t seed_;
  const int rank_;
  const float scale_;
  Workers* const workers_;
  std::vector<Scratch> scratch_;  // per thread
};

HostCoder::HostCoder(std::vector<ReduceTensor>& tensors, const ReduceArgs& args, uint64_t seed,
                     int rank, int size, Workers* workers)
    : tensors_(tensors),
      dtype_(args.dtype),
      seed_(seed),
      rank_(rank),
      scale_(scale_of(args, size)),
      workers_(workers),
      scratch_(workers == nullptr ? 1 : static_cast<size_t>(workers->threads())) {
  check_compressible(args);
  size_t block = kCodedBlock;
  for (const ReduceTensor& tensor : tensors) {
    check(tensor.spec);
    block = std::max<size_t>(block, tensor.spec.bucket);
  }
  for (Scratch& scratch : scratch_) {
    scratch.sum.resize(block);
    scratch.other.resize(block);
  }
}

size_t HostCoder::scratch_bytes() const {
  size_t floats = 0;
  for (const Scratch& s : scratch_) floats += s.sum.capacity() + s.other.capacity();
  return floats * sizeof(float);
}

// Every thread handles consecutive blocks; outcomes are combined in block order, so that quality
// does not depend on the number of threads.
void HostCoder::for_each_block(const Segment& segment, const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<Block> blocks;
  for (const Piece& piece : segment.pieces) {
    const size_t bucket = tensors_[piece.tensor].spec.bucket;
    const size_t step = std::max<size_t>(kCodedBlock / bucket, 1) * bucket;
    for (size_t at = 0; at < piece.count; at += step) {
      blocks.push_back({&piece, at, std::min(step, piece.count - at)});
    }
  }
  std::vector<Outcome> outcomes(blocks.size());
  const auto threads = static_cast<int>(std::min(scratch_.size(), blocks.size()));
  const auto task = [&](size_t thread) {
    const Range mine = part_of(blocks.size(), 1, threads, static_cast<int>(thread));
    for (size_t i = mine.begin; i < mine.end; ++i) work(blocks[i], scratch_[thread], outcomes[i]);
  };
  if (threads > 1) {
    workers_->run(static_cast<size_t>(threads), task);
  } else if (threads == 1) {
    task(0);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    ReduceTensor& tensor = tensor_of(blocks[i]);
    tensor.input_finite &= outcomes[i].input_finite;
    tensor.result_finite &= outcomes[i].result_finite;
    tensor.coding_error += outcomes[i].quality.error;
    tensor.coded_energy += outcomes[i].quality.energy;
    tensor.coded_count += outcomes[i].coded_count;
    tensor.coded_bytes += outcomes[i].coded_bytes;
  }
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  note_coding(tensors_, segment, spent.count());
}

const char* HostCoder::input(const Block& block) {
  return static_cast<const char*>(tensor_of(block).in) +
         (block.piece->begin + block.at) * facts(dtype_).size;
}

char* HostCoder::output(const Block& block) {
  return static_cast<char*>(tensor_of(block).out) +
         (block.piece->begin + block.at) * facts(dtype_).size;
}

float* HostCoder::residual(const Block& block) {
  float* const all = tensor_of(block).residual;
  return all == nullptr ? nullptr : all + block.piece->begin + block.at;
}

float* HostCoder::owner_residual(const Block& block) {
  float* const all = tensor_of(block).owner_residual;
  return all == nullptr ? nullptr : all + block.piece->place + block.at;
}

size_t HostCoder::scales_at(const Block& block) const {
  return block.piece->scales_at + spec_of(block).scales(block.at) * sizeof(float);
}

size_t HostCoder::codes_at(const Block& block) const {
  return block.piece->codes_at + spec_of(block).code_bytes(block.at);
}

NoiseKey HostCoder::key(const ReduceTensor& tensor, Phase phase) const {
  return {seed_, tensor.id, tensor.step, static_cast<uint32_t>(rank_), phase};
}

// The input as float32: in place, or in the buffer.
const float* HostCoder::own_input(const Block& block, std::vector<float>& buffer,
                                  Outcome& outcome) {
  const char* const in = input(block);
  const auto* plain = reinterpret_cast<const float*>(in);
  if (dtype_ != DType::kFloat32) {
    float32_from(in, dtype_, block.count, buffer.data());
    plain = buffer.data();
  }
  outcome.input_finite &= all_finite(plain, block.count);
  return plain;
}

float* HostCoder::sum(const Block& block, const Terms& terms, Scratch& scratch, Outcome& outcome) {
  float* const total = scratch.sum.data();
  for (size_t t = 0; t < terms.size(); ++t) {
    if (terms[t] == kOwn) {
      const float* own = own_input(block, t == 0 ? scratch.sum : scratch.other, outcome);
      if (t > 0) {
        kernels().add(total, own, block.count);
      } else if (own != total) {
        std::memcpy(total, own, block.count * sizeof(float));
      }
    } else if (t == 0) {
      decode_block(block, terms[t], DType::kFloat32, total);
    } else {
      decode_add(reinterpret_cast<const float*>(terms[t] + scales_at(block)),
                 terms[t] + codes_at(block), block.count, spec_of(block), total);
    }
  }
  return total;
}

// Codes x; with residuals, x * by plus the residual `left`.
bool HostCoder::code(const Block& block, const void* x, DType dtype, float by, Phase phase,
                     float* left, uint8_t* message, Outcome& outcome) {
  const Piece& piece = *block.piece;
  const ReduceTensor& tensor = tensors_[piece.tensor];
  const uint64_t first = tensor.first + piece.begin + block.at;
  auto* const scales = reinterpret_cast<float*>(message + scales_at(block));
  uint8_t* const codes = message + codes_at(block);
  const bool finite =
      left == nullptr
          ? encode(x, dtype, block.count, first, tensor.spec, key(tensor, phase), scales, codes)
          : encode_keeping(x, dtype, by, block.count, first, tensor.spec, key(tensor, phase),
                           scales, codes, left);
  if (piece.slot_bytes == 0) return finite;
  outcome.coded_count = block.count;
  for (size_t at = 0; at < spec_of(block).code_bytes(block.count); at += piece.slot_bytes) {
    outcome.coded_bytes += sizeof(SlotLength) + used_bytes(codes + at);
  }
  return finite;
}

bool HostCoder::decode_block(const Block& block, const uint8_t* message, DType dtype,
                             void* to) const {
  return decode(reinterpret_cast<const float*>(message + scales_at(block)),
                message + codes_at(block), block.count, spec_of(block), to, dtype);
}

// Compares every sixteenth bucket, counted within the owner's part of the tensor, with its code.
Quality HostCoder::sample(const Block& block, const void* x, DType dtype, const float* left,
                          const uint8_t* message, std::vector<float>& buffer) const {
  Quality quality;
  if (!tensors_[block.piece->tensor].judged) return quality;
  const size_t size = spec_of(block).bucket;
  const size_t first = (block.piece->place + block.at) / size;
  size_t bucket = (kSampleEvery - first % kSampleEvery) % kSampleEvery;
  for (; bucket * size < block.count; bucket += kSampleEvery) {
    const size_t at = bucket * size;
    const Block one{block.piece, block.at + at, std::min(size, block.count - at)};
    buffer.resize(std::max<size_t>(buffer.size(), 2 * one.count));
    float* const value = buffer.data();
    float* const sent = value + one.count;
    decode_block(one, message, DType::kFloat32, sent);
    if (left == nullptr) {
      float32_from(static_cast<const char*>(x) + at * facts(dtype).size, dtype, one.count, value);
    } else {
      std::memcpy(value, sent, one.count * sizeof(float));
      kernels().add(value, left + at, one.count);
    }
    quality += compare(value, sent, one.count);
  }
  return quality;
}

void HostCoder::contribute(const Segment& segment, const Terms& terms, uint8_t* message) {
  const bool only_own = terms.size() == 1 && terms.front() == kOwn;
  for_each_block(segment, [&](const Block& block, Scratch& scratch, Outcome& outcome) {
    // Directly from the user's memory, in its type, if there is nothing to add.
    const void* x = input(block);
    if (!only_own) x = sum(block, terms, scratch, outcome);
    const DType dtype = only_own ? dtype_ : DType::kFloat32;
    float* const left = residual(block);
    const bool finite = code(block, x, dtype, 1, Phase::kScatter, left, message, outcome);
    if (only_own) outcome.input_finite = finite || all_finite(x, block.count, dtype_);
    outcome.quality = sample(block, x, dtype, left, message, scratch.other);
  });
  seal(message, segment.bytes, segment.kind, segment.count);
}

void HostCoder::conclude(const Segment& segment, const Terms& terms, uint8_t* message) {
  for_each_block(segment, [&](const Block& block, Scratch& scratch, Outcome& outcome) {
    float* const total = sum(block, terms, scratch, outcome);
    float* const owed = owner_residual(block);
    if (owed == nullptr) scale_floats(scale_, block.count, total);
    code(block, total, DType::kFloat32, scale_, Phase::kGather, owed, message, outcome);
    outcome.result_finite = decode_block(block, message, dtype_, output(block));
  });
  seal(message, segment.bytes, segment.kind, segment.count);
}

void HostCoder::deliver(const Segment& segment, const Terms& terms) {
  const bool alone = takes_own(terms);
  for_each_block(segment, [&](const Block& block, Scratch& scratch, Outcome& outcome) {
    float* const total = sum(block, terms, scratch, outcome);
    float* const left = residual(block);
    float* const owed = owner_residual(block);
    if (alone && left != nullptr) kernels().add(total, left, block.count);
    scale_floats(scale_, block.count, total);
    if (alone && owed != nullptr) kernels().add(total, owed, block.count);
    if (alone && owed != nullptr) std::fill_n(owed, block.count, 0.0f);
    if (alone && left != nullptr) std::fill_n(left, block.count, 0.0f);
    outcome.result_finite = float32_to(total, block.count, dtype_, output(block));
  });
}

void HostCoder::accept(const Segment& segment, const uint8_t* message) {
  for_each_block(segment, [&](const Block& block, Scratch&, Outcome& outcome) {
    outcome.result_finite = decode_block(block, message, dtype_, output(block));
  });
}

}  // namespace

void check_compressible(const ReduceArgs& args) {
  const bool sums = args.op == ReduceOp::kSum || args.op == ReduceOp::kAverage;
  if (sums && facts(args.dtype).floating) return;
  throw usage_error(
      std::string("only sums and averages of floating types can be compressed, not ") +
      (sums ? "sums" : "minima, maxima or products") + " of " + facts(args.dtype).name +
      "; use Compression.none for this tensor");
}

float scale_of(const ReduceArgs& args, int size) {
  return static_cast<float>(args.prescale * args.postscale /
                            (args.op == ReduceOp::kAverage ? size : 1));
}

void note_coding(std::vector<ReduceTensor>& tensors, const Segment& segment, double seconds) {
  if (segment.count == 0) return;
  const double each_s = seconds / static_cast<double>(segment.count);
  for (const Piece& piece : segment.pieces) {
    tensors[piece.tensor].coding_s += each_s * static_cast<double>(piece.count);
  }
}

std::unique_ptr<SegmentCoder> make_coder(std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                                         uint64_t seed, int rank, int size, Workers* workers) {
  if (!tensors.empty() && tensors.front().place != nullptr) {
    return tensors.front().place->make_coder(tensors, args, seed, rank, size);
  }
  return std::make_unique<HostCoder>(tensors, args, seed, rank, size, workers);
}

}  // namespace qsgd
