#include "collectives/segment_coder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "collectives/schedule.h"
#include "quant/code.h"

namespace qsgd {
namespace {

constexpr size_t kBlock = 8192;      // its sum, 32 KB, stays in the first caches
constexpr size_t kSampleEvery = 16;  // buckets; their decoding costs about 1/16 of a decoding pass

bool takes_own(const Terms& terms) {
  return std::find(terms.begin(), terms.end(), kOwn) != terms.end();
}

void check_compressible(const ReduceArgs& args) {
  const bool sums = args.op == ReduceOp::kSum || args.op == ReduceOp::kAverage;
  if (sums && facts(args.dtype).floating) return;
  throw usage_error(
      std::string("only sums and averages of floating types can be compressed, not ") +
      (sums ? "sums" : "minima, maxima or products") + " of " + facts(args.dtype).name +
      "; use Compression.none for this tensor");
}

}  // namespace

SegmentCoder::SegmentCoder(std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                           uint64_t seed, int rank, int size, Workers* workers)
    : tensors_(tensors),
      dtype_(args.dtype),
      seed_(seed),
      rank_(rank),
      scale_(static_cast<float>(args.prescale * args.postscale /
                                (args.op == ReduceOp::kAverage ? size : 1))),
      workers_(workers),
      scratch_(workers == nullptr ? 1 : static_cast<size_t>(workers->threads())) {
  check_compressible(args);
  size_t block = kBlock;
  for (const ReduceTensor& tensor : tensors) {
    check(tensor.spec);
    block = std::max<size_t>(block, tensor.spec.bucket);
  }
  for (Scratch& scratch : scratch_) {
    scratch.sum.resize(block);
    scratch.other.resize(block);
  }
}

size_t SegmentCoder::scratch_bytes() const {
  size_t floats = 0;
  for (const Scratch& s : scratch_) floats += s.sum.capacity() + s.other.capacity();
  return floats * sizeof(float);
}

// Every thread takes a run of blocks; outcomes are put together in order of the blocks, so that
// quality does not depend on the number of threads.
void SegmentCoder::for_each_block(const Segment& segment, const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<Block> blocks;
  for (const Piece& piece : segment.pieces) {
    const size_t bucket = tensors_[piece.tensor].spec.bucket;
    const size_t step = std::max<size_t>(kBlock / bucket, 1) * bucket;
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
  note_time(segment, start);
}

// Shared out by size. Two looks at the clock for a segment cost less than a thousandth of it.
void SegmentCoder::note_time(const Segment& segment, std::chrono::steady_clock::time_point start) {
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  if (segment.count == 0) return;
  const double each_s = spent.count() / static_cast<double>(segment.count);
  for (const Piece& piece : segment.pieces) {
    tensors_[piece.tensor].coding_s += each_s * static_cast<double>(piece.count);
  }
}

const char* SegmentCoder::input(const Block& block) {
  return static_cast<const char*>(tensor_of(block).in) +
         (block.piece->begin + block.at) * facts(dtype_).size;
}

char* SegmentCoder::output(const Block& block) {
  return static_cast<char*>(tensor_of(block).out) +
         (block.piece->begin + block.at) * facts(dtype_).size;
}

float* SegmentCoder::residual(const Block& block) {
  float* const all = tensor_of(block).residual;
  return all == nullptr ? nullptr : all + block.piece->begin + block.at;
}

float* SegmentCoder::owner_residual(const Block& block) {
  float* const all = tensor_of(block).owner_residual;
  return all == nullptr ? nullptr : all + block.piece->place + block.at;
}

size_t SegmentCoder::scales_at(const Block& block) const {
  return block.piece->scales_at + spec_of(block).scales(block.at) * sizeof(float);
}

size_t SegmentCoder::codes_at(const Block& block) const {
  return block.piece->codes_at + spec_of(block).code_bytes(block.at);
}

NoiseKey SegmentCoder::key(const ReduceTensor& tensor, Phase phase) const {
  return {seed_, tensor.id, tensor.step, static_cast<uint32_t>(rank_), phase};
}

// The input as float32: where it is, or in the buffer.
const float* SegmentCoder::own_input(const Block& block, std::vector<float>& buffer,
                                     Outcome& outcome) {
  const char* const in = input(block);
  const auto* plain = reinterpret_cast<const float*>(in);
  if (dtype_ != DType::kFloat32) {
    to_floats(in, dtype_, block.count, buffer.data());
    plain = buffer.data();
  }
  outcome.input_finite &= all_finite(plain, block.count);
  return plain;
}

float* SegmentCoder::sum(const Block& block, const Terms& terms, Scratch& scratch,
                         Outcome& outcome) {
  float* const total = scratch.sum.data();
  for (size_t t = 0; t < terms.size(); ++t) {
    if (terms[t] == kOwn) {
      const float* own = own_input(block, t == 0 ? scratch.sum : scratch.other, outcome);
      if (t > 0) {
        add_floats(own, block.count, total);
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

// Codes x; with residuals, x * by and what is left of earlier ones.
bool SegmentCoder::code(const Block& block, const void* x, DType dtype, float by, Phase phase,
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

bool SegmentCoder::decode_block(const Block& block, const uint8_t* message, DType dtype,
                                void* to) const {
  return decode(reinterpret_cast<const float*>(message + scales_at(block)),
                message + codes_at(block), block.count, spec_of(block), to, dtype);
}

// Compares every sixteenth bucket, counted in what the owner owns of the tensor, with its code.
Quality SegmentCoder::sample(const Block& block, const void* x, DType dtype, const float* left,
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
      to_floats(static_cast<const char*>(x) + at * facts(dtype).size, dtype, one.count, value);
    } else {
      std::memcpy(value, sent, one.count * sizeof(float));
      add_floats(left + at, one.count, value);
    }
    quality += compare(value, sent, one.count);
  }
  return quality;
}

void SegmentCoder::contribute(const Segment& segment, const Terms& terms, uint8_t* message) {
  const bool only_own = terms.size() == 1 && terms.front() == kOwn;
  for_each_block(segment, [&](const Block& block, Scratch& scratch, Outcome& outcome) {
    // From the user's memory, in its type, where nothing is to be added.
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

void SegmentCoder::conclude(const Segment& segment, const Terms& terms, uint8_t* message) {
  for_each_block(segment, [&](const Block& block, Scratch& scratch, Outcome& outcome) {
    float* const total = sum(block, terms, scratch, outcome);
    float* const owed = owner_residual(block);
    if (owed == nullptr) scale_floats(scale_, block.count, total);
    code(block, total, DType::kFloat32, scale_, Phase::kGather, owed, message, outcome);
    outcome.result_finite = decode_block(block, message, dtype_, output(block));
  });
  seal(message, segment.bytes, segment.kind, segment.count);
}

void SegmentCoder::deliver(const Segment& segment, const Terms& terms) {
  const bool alone = takes_own(terms);
  for_each_block(segment, [&](const Block& block, Scratch& scratch, Outcome& outcome) {
    float* const total = sum(block, terms, scratch, outcome);
    float* const left = residual(block);
    float* const owed = owner_residual(block);
    if (alone && left != nullptr) add_floats(left, block.count, total);
    scale_floats(scale_, block.count, total);
    if (alone && owed != nullptr) add_floats(owed, block.count, total);
    if (alone && owed != nullptr) std::fill_n(owed, block.count, 0.0f);
    if (alone && left != nullptr) std::fill_n(left, block.count, 0.0f);
    outcome.result_finite = from_floats(total, block.count, dtype_, output(block));
  });
}

void SegmentCoder::accept(const Segment& segment, const uint8_t* message) {
  for_each_block(segment, [&](const Block& block, Scratch&, Outcome& outcome) {
    outcome.result_finite = decode_block(block, message, dtype_, output(block));
  });
}

void SegmentCoder::verify(const Segment& segment, const uint8_t* message, int sender) const {
  qsgd::verify(message, segment.bytes, segment.kind, segment.count, sender);
}

}  // namespace qsgd
