// The kernels behind codec.h. Arithmetic is that of quant/codec.cc, step by step, so that bytes are
// the same: compile without fused multiply-add and with exact division.
//
// A warp takes a bucket of up to 512 elements, 16 a lane, and keeps it in registers: one pass over
// memory. A block takes a larger bucket, and reads it once more from the caches for its second
// pass.
#include <cmath>
#include <limits>

#include "gpu/codec.h"
#include "gpu/tile.h"

namespace qsgd::gpu {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr float kMost = 0x1.fffffep127f;
constexpr float kSmall = 0x1p-126f * 256;  // a level of it is normal
constexpr float kLift = 0x1p64f;  // brings the smallest norms where their inverse is finite
constexpr int kWarps = 4;         // of a block, where each has a bucket of its own
constexpr int kMostWarps = 32;    // of a block, where they share one

// What the kernels need to know of a code.
struct Code {
  explicit Code(const CodecSpec& spec)
      : bucket(spec.bucket),
        bits(spec.bits),
        levels(spec.levels()),
        l2(spec.norm == Norm::kL2),
        nearest(spec.rounding == Rounding::kNearest),
        contract(spec.contract && !nearest) {}
  uint32_t bucket;
  int bits;
  int levels;
  bool l2;
  bool nearest;
  bool contract;
};

// A bucket of a piece: the `index`-th, of the piece's elements from `begin` to `end`.
struct Bucket {
  Piece piece;
  size_t index;
  size_t begin, end;
};

// The bucket with this number among those of all pieces; an empty one behind the last.
__device__ __forceinline__ Bucket find(const Pieces& pieces, size_t number, uint32_t size) {
  Bucket found{pieces.only, 0, 0, 0};
  if (number >= pieces.buckets) return found;
  if (pieces.list != nullptr) {
    uint32_t low = 0, high = pieces.size;  // it is in one of [low, high)
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      (pieces.list[middle].first_bucket <= number ? low : high) = middle;
    }
    found.piece = pieces.list[low];
  }
  found.index = number - found.piece.first_bucket;
  found.begin = found.index * size;
  found.end = found.begin + size < found.piece.count ? found.begin + size : found.piece.count;
  return found;
}

// How a bucket's elements become fixed-point numbers of 16 bits behind the point.
class Grid {
 public:
  __device__ __forceinline__ Grid(float norm, int levels) {
    const float whole = static_cast<float>(levels) * 0x1p16f;
    scale_ = whole / norm;
    lifted_ = !(scale_ <= kMost);
    if (lifted_) scale_ = whole / (norm * kLift);
  }

  // Calls use(number_of), which gives an element's number: one branch for all of a lane's.
  template <class Use>
  __device__ __forceinline__ void choose(const Use& use) const {
    const float scale = scale_;
    if (lifted_) {
      use([scale](float x) { return __float2int_rn(x * kLift * scale); });
    } else {
      use([scale](float x) { return __float2int_rn(x * scale); });
    }
  }

 private:
  float scale_;
  bool lifted_;
};

__device__ __forceinline__ uint32_t largest_magnitude(const float* value) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const uint32_t magnitude = __float_as_uint(value[i]) & 0x7fffffffu;
    most = most > magnitude ? most : magnitude;
  }
  return most;
}

// Over `lanes` lanes that lie together, a power of two; all of them get it.
__device__ __forceinline__ uint32_t max_of_lanes(uint32_t most, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    const uint32_t other = lane_xor(most, mask);
    most = most > other ? most : other;
  }
  return most;
}

__device__ __forceinline__ uint64_t sum_of_lanes(uint64_t sum) {
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += lane_xor(sum, mask);
  return sum;
}

__device__ __forceinline__ float norm_of_magnitude(uint32_t most) {
  return most < kInfinity ? __uint_as_float(most) : __uint_as_float(0x7fc00000u);
}

__device__ __forceinline__ float norm_of_energy(double energy) {
  const double l2 = sqrt(energy);
  if (!(l2 <= 0x1.fffffffffffffp1023)) return __uint_as_float(0x7fc00000u);
  // Finite elements can have a norm beyond float32; it must not read as "not finite".
  return l2 > static_cast<double>(kMost) ? kMost : static_cast<float>(l2);
}

// The sum of squares of a bucket in the order of the CPU's: element i goes to partial sum i % 32.
// Lane s keeps partial sum s; `staged` brings it the elements of all others.
class Energy {
 public:
  __device__ __forceinline__ explicit Energy(float* staged) : staged_(staged) {}

  // Adds the first `count` elements of a span.
  __device__ __forceinline__ void add(const float* value, int lane, size_t count) {
    const int tile = lane / kTileLanes * kTile, j = lane % kTileLanes;
    sync_lanes();  // the last span has been read
#pragma unroll
    for (int p = 0; p < 4; ++p) {
#pragma unroll
      for (int c = 0; c < 4; ++c) staged_[tile + 16 * p + 4 * j + c] = value[4 * p + c];
    }
    sync_lanes();
    for (size_t at = lane; at < count && at < kSpan; at += kLanes) {
      const double x = static_cast<double>(staged_[at]);
      sum_ += x * x;
    }
  }

  // On every lane.
  __device__ __forceinline__ double total() const {
    double sum = sum_;
    for (int half = kLanes / 2; half > 0; half /= 2) sum += lane_down(sum, half);
    return lane_get(sum, 0);
  }

 private:
  float* staged_;
  double sum_ = 0;
};

// A word of the third byte of each: what stands before the point of four fixed-point numbers.
__device__ __forceinline__ uint32_t third_bytes(const uint32_t* of) {
  return __byte_perm(__byte_perm(of[0], of[1], 0x62), __byte_perm(of[2], of[3], 0x62), 0x5410);
}

// Codes a lane's elements of the piece's tile `tile`, four to a word, and packs them to `codes`,
// the piece's, unless that is null. Returns the sum of f (1 - f) over them, f being how far each
// lies above its lower level, in units of 2^-32; 0 with kPlain, which is for codes that round at
// random and do not contract.
template <bool kPlain>
__device__ __forceinline__ uint64_t quantize(const float* value, float norm, const Code& code,
                                             const Philox& philox, uint64_t first_tile, size_t tile,
                                             int j, uint32_t* codes, uint32_t* word) {
  uint64_t variance = 0;
  if (norm > 0) {
    int noise[kMine];
    if (kPlain || !code.nearest) draw(philox, first_tile + tile, j, noise);
    Grid(norm, code.levels).choose([&](const auto& number_of) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        uint32_t level[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int number = number_of(value[4 * p + c]);
          // One less below zero: ties move away from zero on both sides.
          const bool nearest = !kPlain && code.nearest;
          const int up = nearest ? (1 << 15) + (number >> 31) : noise[4 * p + c];
          if constexpr (!kPlain) {
            const uint64_t fraction = static_cast<uint32_t>(number) & 0xffffu;
            variance += fraction * (0x10000u - fraction);
          }
          level[c] = static_cast<uint32_t>(number + up + (code.levels << 16));
        }
        word[p] = third_bytes(level);
      }
    });
  } else {  // zeros, or what is not finite
#pragma unroll
    for (int p = 0; p < 4; ++p) word[p] = static_cast<uint32_t>(code.levels) * 0x01010101u;
  }
  pack(word, code.bits, j, codes == nullptr ? nullptr : codes + tile * (2 * code.bits));
  return variance;
}

// The scale that a bucket's decoders see: less than its norm where the code must contract.
__device__ __forceinline__ float contracted(float norm, int levels, uint64_t variance,
                                            double energy) {
  const double unit = static_cast<double>(norm) / levels;
  const double w = unit * unit * (static_cast<double>(variance) * 0x1p-32) / energy;
  return norm * (w >= 1 ? static_cast<float>(1 / (1 + w)) : 1.0f);
}

// What a level is worth where float32 is coarse or ends. Seldom needed, so that it must not take
// registers from what is.
__device__ __noinline__ float extreme_value(float level, float norm, int levels) {
  return static_cast<float>(static_cast<double>(level) * static_cast<double>(norm) / levels);
}

// What codes are worth: unit times level, but in float64 where float32 is coarse or ends.
class Values {
 public:
  __device__ __forceinline__ Values(float norm, int levels)
      : norm_(norm),
        unit_(norm / static_cast<float>(levels)),
        levels_(levels),
        extreme_((norm < kSmall && norm != 0) || norm > kMost / 2) {}

  // Calls use(i, value) for each of a lane's 16 codes.
  template <class Use>
  __device__ __forceinline__ void each(const uint32_t* word, const Use& use) const {
    if (extreme_) {
#pragma unroll
      for (int i = 0; i < kMine; ++i) use(i, extreme_value(level(word, i), norm_, levels_));
    } else {
#pragma unroll
      for (int i = 0; i < kMine; ++i) use(i, level(word, i) * unit_);
    }
  }

 private:
  // The code's byte becomes the last one of 2^23 + code, from which the rest is taken: exact, and
  // less work than a shift, a mask and a conversion.
  __device__ __forceinline__ float level(const uint32_t* word, int i) const {
    constexpr uint32_t kOfFloat = 0x4b000000u;  // 2^23
    const uint32_t bits = __byte_perm(word[i / 4], kOfFloat, 0x7650u + i % 4);
    return __uint_as_float(bits) - (0x1p23f + static_cast<float>(levels_));
  }

  float norm_, unit_;
  int levels_;
  bool extreme_;
};

__device__ __forceinline__ float scale_of(const uint8_t* message, const Bucket& bucket) {
  return reinterpret_cast<const float*>(message + bucket.piece.scales_at)[bucket.index];
}

// Calls use(i, value) for the lane's 16 elements of a tile of a bucket.
template <class Use>
__device__ __forceinline__ void each_value(const uint8_t* message, const Bucket& bucket,
                                           const Code& code, size_t tile, int j, const Use& use) {
  const auto* const codes = reinterpret_cast<const uint32_t*>(message + bucket.piece.codes_at);
  uint32_t word[4];
  unpack(codes + tile * (2 * code.bits), code.bits, j, word);
  Values(scale_of(message, bucket), code.levels).each(word, use);
}

// What an encoder reads and writes beside its source.
struct Encoding {
  Pieces pieces;
  Code code;
  Draw draw;
  uint8_t* message;
  uint32_t* nonfinite;

  __device__ __forceinline__ Philox philox(const Piece& piece) const {
    const uint32_t step = draw.step + (draw.later == nullptr ? 0 : *draw.later);
    return {piece.tensor, uint64_t{draw.who} << 32 | step};
  }
  __device__ __forceinline__ uint32_t* codes(const Piece& piece) const {
    return reinterpret_cast<uint32_t*>(message + piece.codes_at);
  }
  __device__ __forceinline__ void report(const Bucket& bucket, float scale) const {
    float* const scales = reinterpret_cast<float*>(message + bucket.piece.scales_at);
    scales[bucket.index] = scale;
    if (nonfinite != nullptr && scale != scale) atomicOr(nonfinite, 1u);
  }
};

// Buckets of up to 512 elements: 2^shift lanes for each, all of a warp unless the bucket is a power
// of two and has less work for them. kPlain: with the largest norm, as quantize() has it.
template <class Source, bool kPlain>
__global__ void __launch_bounds__(kWarps* kLanes, kPlain ? Source::kBlocks : 1)
    encode_small(const Source source, const Encoding to, int shift) {
  const Code& code = to.code;
  const int lanes = 1 << shift;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int part = lane & (lanes - 1), j = part % kTileLanes;
  const size_t number =
      (size_t{blockIdx.x} * kWarps + warp) << (kLanesShift - shift) | lane >> shift;
  const Bucket bucket = find(to.pieces, number, code.bucket);
  const size_t at = bucket.begin + part / kTileLanes * kTile;
  const bool mine = at < bucket.end;

  float value[kMine] = {};
  if (mine) source.load(bucket, at, j, value);
  float norm = norm_of_magnitude(max_of_lanes(largest_magnitude(value), lanes));
  double energy = 0;
  if constexpr (!kPlain) {
    __shared__ float staged[kWarps][kSpan];
    if (code.l2 || code.contract) {  // then the bucket has the warp for itself
      Energy sum(staged[warp]);
      sum.add(value, lane, bucket.end - bucket.begin);
      energy = sum.total();
    }
    if (code.l2) norm = norm_of_energy(energy);
  }
  uint32_t word[4];
  const uint64_t variance =
      quantize<kPlain>(value, norm, code, to.philox(bucket.piece), bucket.piece.first / kTile,
                       at / kTile, j, mine ? to.codes(bucket.piece) : nullptr, word);
  float scale = norm;
  if (!kPlain && code.contract && norm > 0) {
    scale = contracted(norm, code.levels, sum_of_lanes(variance), energy);
  }
  if (mine && part == 0) to.report(bucket, scale);
  if (mine && source.keeps(bucket.piece)) {
    Values(scale, code.levels).each(word, [&](int i, float x) { value[i] -= x; });
    source.keep(bucket.piece, at, j, value);
  }
}

// Larger buckets, one to a block.
template <class Source>
__global__ void __launch_bounds__(kMostWarps* kLanes)
    encode_large(const Source source, const Encoding to) {
  __shared__ float staged[kSpan];
  __shared__ uint32_t most_of[kMostWarps];
  __shared__ uint64_t variance_of[kMostWarps];
  __shared__ double energy;
  const Code& code = to.code;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int warps = static_cast<int>(blockDim.x) / kLanes;
  const int j = lane % kTileLanes;
  const Bucket bucket = find(to.pieces, blockIdx.x, code.bucket);
  const size_t lane_at = lane / kTileLanes * kTile;
  const auto load = [&](size_t span, float* value) {
    const size_t at = span + lane_at;
    for (int i = 0; i < kMine; ++i) value[i] = 0;
    if (at < bucket.end) source.load(bucket, at, j, value);
    return at < bucket.end;
  };

  uint32_t most = 0;
  for (size_t span = bucket.begin + warp * kSpan; span < bucket.end; span += warps * kSpan) {
    float value[kMine];
    load(span, value);
    const uint32_t here = largest_magnitude(value);
    most = most > here ? most : here;
  }
  most = max_of_lanes(most, kLanes);
  if (lane == 0) most_of[warp] = most;
  if ((code.l2 || code.contract) && warp == 0) {  // its order leaves no work for the others
    Energy sum(staged);
    for (size_t span = bucket.begin; span < bucket.end; span += kSpan) {
      float value[kMine];
      load(span, value);
      sum.add(value, lane, bucket.end - span);
    }
    const double total = sum.total();
    if (lane == 0) energy = total;
  }
  __syncthreads();
  for (int other = 0; other < warps; ++other) {
    most = most > most_of[other] ? most : most_of[other];
  }

  const float norm = code.l2 ? norm_of_energy(energy) : norm_of_magnitude(most);
  const Philox philox = to.philox(bucket.piece);
  uint64_t variance = 0;
  for (size_t span = bucket.begin + warp * kSpan; span < bucket.end; span += warps * kSpan) {
    float value[kMine];
    uint32_t word[4];
    const bool mine = load(span, value);
    variance +=
        quantize<false>(value, norm, code, philox, bucket.piece.first / kTile,
                        (span + lane_at) / kTile, j, mine ? to.codes(bucket.piece) : nullptr, word);
  }
  if (code.contract) {
    variance = sum_of_lanes(variance);
    if (lane == 0) variance_of[warp] = variance;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    float scale = norm;
    if (code.contract && norm > 0) {
      variance = 0;
      for (int other = 0; other < warps; ++other) variance += variance_of[other];
      scale = contracted(norm, code.levels, variance, energy);
    }
    to.report(bucket, scale);
  }
  if (!source.keeps(bucket.piece)) return;
  __syncthreads();  // the scale and the codes are there
  for (size_t span = bucket.begin + warp * kSpan; span < bucket.end; span += warps * kSpan) {
    float value[kMine];
    if (!load(span, value)) continue;
    const size_t at = span + lane_at;
    each_value(to.message, bucket, code, at / kTile, j, [&](int i, float x) { value[i] -= x; });
    source.keep(bucket.piece, at, j, value);
  }
}

struct Decoding {
  Pieces pieces;
  Code code;
  const uint8_t* message;
  uint32_t* nonfinite;
};

// 2^shift lanes for a bucket: a part of a warp, or whole warps that lie together.
template <class Real, bool Add>
__global__ void __launch_bounds__(256, 4) decode_kernel(Real* out, const Decoding from, int shift) {
  const size_t thread = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int lanes = 1 << shift;
  const int part = static_cast<int>(thread) & (lanes - 1), j = part % kTileLanes;
  const Bucket bucket = find(from.pieces, thread >> shift, from.code.bucket);
  const Piece& piece = bucket.piece;
  const auto to = Array<Real>::of(out + piece.at, piece.count);
  for (size_t at = bucket.begin + part / kTileLanes * kTile; at < bucket.end;
       at += lanes / kTileLanes * kTile) {
    float value[kMine] = {};
    if constexpr (Add) to.load(at, j, value);
    each_value(from.message, bucket, from.code, at / kTile, j,
               [&](int i, float x) { value[i] = Add ? value[i] + x : x; });
    to.store(at, j, value);
  }
  if (from.nonfinite == nullptr || part != 0 || bucket.begin == bucket.end) return;
  const uint32_t scale = __float_as_uint(scale_of(from.message, bucket));
  if ((scale & 0x7fffffffu) >= kInfinity) atomicOr(from.nonfinite, 1u);
}

__device__ __forceinline__ float* floats(uint64_t address) {
  return reinterpret_cast<float*>(address);
}

// Adds what an earlier code has lost of a lane's elements.
__device__ __forceinline__ void add_residual(uint64_t residual, const Piece& piece, size_t at,
                                             int j, float* value) {
  if (residual == 0) return;
  float left[kMine];
  Array<float>::of(floats(residual), piece.count).load(at, j, left);
#pragma unroll
  for (int i = 0; i < kMine; ++i) value[i] += left[i];
}

// Keeps what this code has lost. What is not finite would never leave again.
__device__ __forceinline__ void set_residual(uint64_t residual, const Piece& piece, size_t at,
                                             int j, const float* left) {
  if (residual == 0) return;
  float kept[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    kept[i] = (__float_as_uint(left[i]) & 0x7fffffffu) < kInfinity ? left[i] : 0.0f;
  }
  Array<float>::of(floats(residual), piece.count).store(at, j, kept);
}

// Where an encoder has its elements from, and how many blocks of it a multiprocessor should hold so
// that some compute while others wait: an array,
template <class Real>
struct FromArray {
  static constexpr int kBlocks = 8;
  Real* data;

  __device__ __forceinline__ void load(const Bucket& bucket, size_t at, int j, float* value) const {
    const Piece& piece = bucket.piece;
    Array<Real>::of(data + piece.at, piece.count).load(at, j, value);
    add_residual(piece.residual, piece, at, j, value);
  }
  __device__ __forceinline__ bool keeps(const Piece& piece) const { return piece.residual != 0; }
  __device__ __forceinline__ void keep(const Piece& piece, size_t at, int j,
                                       const float* left) const {
    set_residual(piece.residual, piece, at, j, left);
  }
};

// or the sum over ranks of what they have coded, and of an array.
template <class Real>
struct FromSum {
  static constexpr int kBlocks = 6;
  FromArray<Real> input;
  Addends addends;
  Code code;

  __device__ __forceinline__ void load(const Bucket& bucket, size_t at, int j, float* value) const {
    const Piece& piece = bucket.piece;
#pragma unroll
    for (int i = 0; i < kMine; ++i) value[i] = 0;
#pragma unroll 1
    for (int rank = 0; rank < addends.ranks; ++rank) {
      if (rank == addends.own) {
        float mine[kMine];
        input.load(bucket, at, j, mine);
#pragma unroll
        for (int i = 0; i < kMine; ++i) value[i] += mine[i];
      } else {
        each_value(addends.messages + addends.stride * static_cast<size_t>(rank), bucket, code,
                   at / kTile, j, [&](int i, float x) { value[i] += x; });
      }
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) value[i] *= addends.factor;
    if (at + kTile > piece.count) {
      // What a message has behind the piece's end is padding, and need not be the code of zero.
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (at + 16 * (i / 4) + 4 * j + i % 4 >= piece.count) value[i] = 0;
      }
    }
    add_residual(piece.owner_residual, piece, at, j, value);
  }
  __device__ __forceinline__ bool keeps(const Piece& piece) const {
    return piece.residual != 0 || piece.owner_residual != 0;
  }
  __device__ __forceinline__ void keep(const Piece& piece, size_t at, int j,
                                       const float* left) const {
    const float sent[kMine] = {};  // this rank's own addend was added as it was
    set_residual(piece.residual, piece, at, j, sent);
    set_residual(piece.owner_residual, piece, at, j, left);
  }
};

const char* refuse(const Run& run) {
  if (run.spec.scheme != Scheme::kQsgd) return "only QSGD's own code is made on GPUs";
  if (run.spec.bits < 2 || run.spec.bits > 8) return "bits must be 2 to 8";
  if (run.spec.bucket == 0 || run.spec.bucket % kTile != 0) return "bucket not a multiple of 64";
  return nullptr;
}

constexpr int log2_of(unsigned power_of_two) {
  int log2 = 0;
  while (power_of_two >> log2 > 1) ++log2;
  return log2;
}

// How many lanes share a bucket of up to a span, as the power of two that it is: as few as it has
// work for, where they divide a warp.
int lanes_shift(uint32_t bucket) {
  return (bucket & (bucket - 1)) == 0 ? log2_of(bucket / kMine) : kLanesShift;
}

template <class Source>
const char* encode_from(const Source& source, const Run& run, const Draw& draw, uint8_t* message,
                        Stream stream) {
  const Encoding to{run.pieces, Code(run.spec), draw, message, run.nonfinite};
  const size_t buckets = run.pieces.buckets;
  const bool shared = to.code.l2 || to.code.contract;
  if (to.code.bucket > kSpan) {
    const size_t spans = (size_t{to.code.bucket} + kSpan - 1) / kSpan;
    const auto warps = static_cast<unsigned>(spans < kMostWarps ? spans : kMostWarps);
    launch(encode_large<Source>, buckets, warps * kLanes, stream, source, to);
  } else {
    const int shift = shared ? kLanesShift : lanes_shift(to.code.bucket);
    const auto kernel =
        shared || to.code.nearest ? encode_small<Source, false> : encode_small<Source, true>;
    const size_t of_block = size_t{kWarps} << (kLanesShift - shift);
    launch(kernel, (buckets + of_block - 1) / of_block, kWarps * kLanes, stream, source, to, shift);
  }
  return last_error();
}

// Calls f with a value of the C++ type behind a floating `t`.
template <class F>
const char* floating(DType t, const F& f) {
  switch (t) {
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat64:
      return f(double{});
    case DType::kFloat16:
      return f(Float16{});
    case DType::kBFloat16:
      return f(BFloat16{});
    default:
      return "only floating tensors are coded";
  }
}

// The kernels read elements through the type that they write them with.
template <class Real>
Real* elements(const void* x) {
  return static_cast<Real*>(const_cast<void*>(x));
}

const char* encode(const void* x, const Run& run, const Draw& draw, uint8_t* message,
                   Stream stream) {
  if (const char* why = refuse(run)) return why;
  if (run.pieces.buckets == 0) return nullptr;
  return floating(run.dtype, [&](auto real) {
    using Real = decltype(real);
    return encode_from(FromArray<Real>{elements<Real>(x)}, run, draw, message, stream);
  });
}

template <class Real, bool Add>
const char* decode_to(const uint8_t* message, const Run& run, Real* out, Stream stream) {
  constexpr unsigned kThreads = 256;
  const Decoding from{run.pieces, Code(run.spec), message, run.nonfinite};
  const int shift = from.code.bucket > kSpan ? log2_of(kThreads) : lanes_shift(from.code.bucket);
  const size_t threads = run.pieces.buckets << shift;
  launch(decode_kernel<Real, Add>, (threads + kThreads - 1) / kThreads, kThreads, stream, out, from,
         shift);
  return last_error();
}

const char* decode(const uint8_t* message, const Run& run, void* out, Stream stream) {
  if (const char* why = refuse(run)) return why;
  if (run.pieces.buckets == 0) return nullptr;
  return floating(run.dtype, [&](auto real) {
    using Real = decltype(real);
    return decode_to<Real, false>(message, run, elements<Real>(out), stream);
  });
}

const char* decode_add(const uint8_t* message, const Run& run, float* sum, Stream stream) {
  if (const char* why = refuse(run)) return why;
  if (run.pieces.buckets == 0) return nullptr;
  return decode_to<float, true>(message, run, sum, stream);
}

const char* sum_encode(const Addends& addends, const void* x, const Run& run, const Draw& draw,
                       uint8_t* message, Stream stream) {
  if (const char* why = refuse(run)) return why;
  if (addends.ranks < 1) return "no ranks to sum";
  if (addends.stride % 4 != 0) return "stride of messages not a multiple of 4";
  if (run.pieces.buckets == 0) return nullptr;
  return floating(run.dtype, [&](auto real) {
    using Real = decltype(real);
    const FromSum<Real> sum{{elements<Real>(x)}, addends, Code(run.spec)};
    return encode_from(sum, run, draw, message, stream);
  });
}

}  // namespace
}  // namespace qsgd::gpu

extern "C" __attribute__((visibility("default"))) const qsgd::gpu::Library* qsgd_gpu_library() {
  using namespace qsgd::gpu;
  static const Library library{kLibraryVersion, platform(), encode, decode, decode_add, sum_encode};
  return &library;
}
