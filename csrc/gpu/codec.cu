// Kernels of codec.h.
//
// A warp codes a bucket of up to 512 elements, 16 per lane, in registers: one pass over memory. A
// thread block codes a larger bucket, whose second pass reads from the caches.
#include "gpu/codec.h"
#include "gpu/eden.h"
#include "gpu/encoding.h"
#include "gpu/judge.h"
#include "gpu/order.h"
#include "gpu/quantize.h"
#include "gpu/scale.h"
#include "gpu/sources.h"
#include "gpu/values.h"

void qsgd::refuse_unknown(DType) { __builtin_trap(); }  // the core has checked the types

namespace qsgd::gpu {
namespace {

constexpr int kMostWarps = 32;  // of a thread block that codes one bucket
constexpr unsigned kDecodeThreads = 256;

// Buckets of up to 512 elements, with 2^shift lanes each: a complete warp unless the bucket is a
// power of two with less work. kPlain: with the maximum norm, see quantize().
template <class Source, bool kPlain>
__global__ void __launch_bounds__(kWarps* kLanes, kPlain ? Source::kBlocks : 1)
    encode_small(const Source source, const Encoding to, int shift) {
  const Code& code = to.code;
  const int lanes = 1 << shift;
  const uint32_t lane = threadIdx.x & (lanes - 1);
  const Bucket bucket =
      find(to.pieces, static_cast<uint32_t>(number_of_lane() >> shift), code.bucket);
  const Part part(bucket, lane / kTileLanes * kTile, lane % kTileLanes);
  const bool mine = !part.empty();

  float value[kMine];
  source.load(bucket, part, value);
  float norm = norm_of_magnitude(max_of_lanes(largest_magnitude(value), lanes));
  double energy = 0;
  if constexpr (!kPlain) {
    __shared__ float staged[kWarps][kSpan];
    if (code.l2 || code.contract) {  // then a warp codes only this bucket
      Energy sum(staged[threadIdx.x / kLanes]);
      sum.add(value, lane, bucket.size);
      energy = sum.total();
    }
    if (code.l2) norm = norm_of_energy(energy);
  }
  const Piece& piece = bucket.piece;
  uint32_t word[4];
  const uint64_t variance =
      quantize<kPlain>(value, norm, code, to.philox(piece), to.tile(piece, part), part.j,
                       to.codes(piece, part), mine, word);
  float scale = norm;
  if (!kPlain && code.contract && norm > 0) {
    scale = contracted(norm, code.levels, sum_of_lanes(variance), energy);
  }
  if (mine && lane == 0) to.report(bucket, scale);
  if (mine && source.keeps(piece)) {
    Values(scale, code).each(word, [&](int i, float x) { value[i] -= x; });
    source.keep(piece, part, value);
  }
}

// Larger buckets, one per thread block.
template <class Source>
__global__ void __launch_bounds__(kMostWarps* kLanes)
    encode_large(const Source source, const Encoding to) {
  __shared__ float staged[kSpan];
  __shared__ uint32_t most_of[kMostWarps];
  __shared__ uint64_t variance_of[kMostWarps];
  __shared__ double energy;
  const Code& code = to.code;
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint32_t warps = blockDim.x / kLanes;
  const Bucket bucket = find(to.pieces, blockIdx.x, code.bucket);
  const auto part_of = [&](uint32_t span) {
    return Part(bucket, span + lane / kTileLanes * kTile, lane % kTileLanes);
  };
  const auto load = [&](const Part& part, float* value) { source.load(bucket, part, value); };

  uint32_t most = 0;
  for (uint32_t span = warp * kSpan; span < bucket.size; span += warps * kSpan) {
    float value[kMine];
    load(part_of(span), value);
    const uint32_t here = largest_magnitude(value);
    most = most > here ? most : here;
  }
  most = max_of_lanes(most, kLanes);
  if (lane == 0) most_of[warp] = most;
  if ((code.l2 || code.contract) && warp == 0) {  // the order of the sum leaves others no work
    Energy sum(staged);
    for (uint32_t span = 0; span < bucket.size; span += kSpan) {
      float value[kMine];
      load(part_of(span), value);
      sum.add(value, lane, bucket.size - span);
    }
    const double total = sum.total();
    if (lane == 0) energy = total;
  }
  __syncthreads();
  for (uint32_t other = 0; other < warps; ++other) {
    most = most > most_of[other] ? most : most_of[other];
  }

  const float norm = code.l2 ? norm_of_energy(energy) : norm_of_magnitude(most);
  const Philox philox = to.philox(bucket.piece);
  uint64_t variance = 0;
  for (uint32_t span = warp * kSpan; span < bucket.size; span += warps * kSpan) {
    float value[kMine];
    uint32_t word[4];
    const Part part = part_of(span);
    load(part, value);
    variance += quantize<false>(value, norm, code, philox, to.tile(bucket.piece, part), part.j,
                                to.codes(bucket.piece, part), !part.empty(), word);
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
      for (uint32_t other = 0; other < warps; ++other) variance += variance_of[other];
      scale = contracted(norm, code.levels, variance, energy);
    }
    to.report(bucket, scale);
  }
  if (!source.keeps(bucket.piece)) return;
  __syncthreads();  // scale and codes have been written
  for (uint32_t span = warp * kSpan; span < bucket.size; span += warps * kSpan) {
    float value[kMine];
    const Part part = part_of(span);
    if (part.empty()) continue;
    load(part, value);
    each_value(to.message, bucket, code, part, [&](int i, float x) { value[i] -= x; });
    source.keep(bucket.piece, part, value);
  }
}

// 2^shift lanes per bucket: a part of a warp, or consecutive warps.
template <class Real, class Source>
__global__ void __launch_bounds__(kDecodeThreads,
                                  Source::kBlocks * kWarps * kLanes / kDecodeThreads)
    decode_kernel(Real* out, const Source from, int shift) {
  const uint32_t lanes = 1u << shift;
  const uint32_t lane = threadIdx.x & (lanes - 1);
  const Bucket bucket = find(from.pieces, number_of_lane() >> shift, from.code.bucket);
  for (uint32_t in = lane / kTileLanes * kTile; in < bucket.size; in += lanes * kMine) {
    const Part part(bucket, in, lane % kTileLanes);
    float value[kMine];
    from.load(bucket, part, value);
    Mine<Real>(out + bucket.piece.at, part).store(value);
  }
  if (lane == 0) from.report(bucket);
}

bool rotates(const CodecSpec& spec) { return spec.scheme == Scheme::kEden; }

const char* refuse(const CodecSpec& spec) {
  const bool rotated = rotates(spec);
  if (spec.scheme != Scheme::kQsgd && !rotated) return "a code without GPU kernels";
  if (spec.bits > 8 || spec.bits < 1) return "bits must be 1 to 8";
  if (spec.bits == 1 && !rotated) return "bits must be 2 to 8";
  if (spec.bucket == 0 || spec.bucket % kTile != 0) return "bucket not a multiple of 64";
  if (rotated && ((spec.bucket & (spec.bucket - 1)) != 0 || spec.bucket > kMostRotated)) {
    return "bucket not a power of two up to 512";
  }
  return nullptr;
}

constexpr int log2_of(unsigned power_of_two) {
  int log2 = 0;
  while (power_of_two >> log2 > 1) ++log2;
  return log2;
}

// log2 of the number of lanes for a bucket of up to a span: as few as have work, if that divides a
// warp.
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

template <class Source>
const char* encode_rotated_from(const Source& source, const Run& run, const Draw& draw,
                                uint8_t* message, Stream stream) {
  const Encoding to{run.pieces, Code(run.spec), draw, message, run.nonfinite};
  const int shift = lanes_shift(to.code.bucket);
  const size_t of_block = size_t{kWarps} << (kLanesShift - shift);
  launch(encode_rotated<Source>, (run.pieces.buckets + of_block - 1) / of_block, kWarps * kLanes,
         stream, source, to, shift);
  return last_error();
}

// Calls f with a value of the C++ type for a floating `t`.
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

// The kernels use one pointer type for reading and writing.
template <class Real>
Real* elements(const void* x) {
  return static_cast<Real*>(const_cast<void*>(x));
}

const char* encode(const void* x, const Run& run, const Draw& draw, uint8_t* message,
                   Stream stream) {
  if (const char* why = refuse(run.spec)) return why;
  if (run.pieces.buckets == 0) return nullptr;
  return floating(run.dtype, [&](auto real) {
    using Real = decltype(real);
    const FromArray<Real> array{elements<Real>(x)};
    if (!rotates(run.spec)) return encode_from(array, run, draw, message, stream);
    return encode_rotated_from(RotatedArray<Real>{array}, run, draw, message, stream);
  });
}

template <class Source, class Real>
const char* decode_from(const Source& from, Real* out, Stream stream) {
  const int shift =
      from.code.bucket > kSpan ? log2_of(kDecodeThreads) : lanes_shift(from.code.bucket);
  const size_t threads = from.pieces.buckets << shift;
  launch(decode_kernel<Real, Source>, (threads + kDecodeThreads - 1) / kDecodeThreads,
         kDecodeThreads, stream, out, from, shift);
  return last_error();
}

template <class Source, class Real>
const char* decode_rotated_from(const Source& from, Real* out, Stream stream) {
  const int shift = lanes_shift(from.code.bucket);
  const size_t of_block = size_t{kWarps} << (kLanesShift - shift);
  launch(decode_rotated<Real, Source>, (from.pieces.buckets + of_block - 1) / of_block,
         kWarps * kLanes, stream, out, from, shift);
  return last_error();
}

const char* decode(const uint8_t* message, const Run& run, void* out, Stream stream) {
  if (const char* why = refuse(run.spec)) return why;
  if (run.pieces.buckets == 0) return nullptr;
  return floating(run.dtype, [&](auto real) {
    using Real = decltype(real);
    const Decoding from{run.pieces, Code(run.spec), message, run.nonfinite};
    if (!rotates(run.spec)) return decode_from(from, elements<Real>(out), stream);
    return decode_rotated_from(RotatedDecoding{from}, elements<Real>(out), stream);
  });
}

const char* refuse_sum(const Addends& addends, const Run& run) {
  if (const char* why = refuse(run.spec)) return why;
  if (addends.ranks < 1) return "no ranks to sum";
  if (addends.stride % 4 != 0) return "stride of messages not a multiple of 4";
  return nullptr;
}

const char* sum(const Addends& addends, const void* x, const Run& run, void* out, Stream stream) {
  if (const char* why = refuse_sum(addends, run)) return why;
  if (run.pieces.buckets == 0) return nullptr;
  return floating(run.dtype, [&](auto real) {
    using Real = decltype(real);
    using Sum = FromSum<Real>;
    const Sum all{{elements<Real>(x)}, addends, Code(run.spec)};
    if (!rotates(run.spec)) {
      return decode_from(Summing<Sum>{all, run.pieces}, elements<Real>(out), stream);
    }
    const Summing<RotatedSum<Real>> rotated{{all}, run.pieces};
    return decode_rotated_from(rotated, elements<Real>(out), stream);
  });
}

const char* sum_encode(const Addends& addends, const void* x, const Run& run, const Draw& draw,
                       uint8_t* message, Stream stream) {
  if (const char* why = refuse_sum(addends, run)) return why;
  if (run.pieces.buckets == 0) return nullptr;
  return floating(run.dtype, [&](auto real) {
    using Real = decltype(real);
    const FromSum<Real> sum{{elements<Real>(x)}, addends, Code(run.spec)};
    if (!rotates(run.spec)) return encode_from(sum, run, draw, message, stream);
    return encode_rotated_from(RotatedSum<Real>{sum}, run, draw, message, stream);
  });
}

const char* judge(const void* x, const uint8_t* message, const Run& run, uint32_t every,
                  Judged* sums, Stream stream) {
  if (const char* why = refuse(run.spec)) return why;
  if (every < 1) return "every must be at least 1";
  if (run.pieces.buckets == 0) return nullptr;
  return floating(run.dtype, [&](auto real) {
    using Real = decltype(real);
    const Decoding from{run.pieces, Code(run.spec), message, run.nonfinite};
    const size_t each = size_t{kWarps} * every;
    const auto kernel = rotates(run.spec) ? judge_buckets<Real, true> : judge_buckets<Real, false>;
    launch(kernel, (run.pieces.buckets + each - 1) / each, kWarps * kLanes, stream,
           FromArray<Real>{elements<Real>(x)}, from, every, sums);
    return last_error();
  });
}

}  // namespace
}  // namespace qsgd::gpu

extern "C" __attribute__((visibility("default"))) const qsgd::gpu::Library* qsgd_gpu_library() {
  using namespace qsgd::gpu;
  static const Library library{kLibraryVersion,
                               platform(),
                               refuse,
                               encode,
                               decode,
                               sum,
                               sum_encode,
                               judge,
                               scale,
                               order::use,
                               order::identify,
                               order::make_stream,
                               order::end_stream,
                               order::make_event,
                               order::end_event,
                               order::record,
                               order::wait,
                               order::passed,
                               order::copy,
                               order::clear,
                               order::take_pinned,
                               order::give_pinned,
                               order::take,
                               order::give};
  return &library;
}
