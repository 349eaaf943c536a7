// Rotated buckets, quantised to the optimal levels of the normal distribution, because rotated
// elements are nearly normally distributed: Vargaftik et al., EDEN, ICML 2022, after DRIVE, NeurIPS
// 2021.
//
// A bucket x of d elements, a power of two (a last short one is padded with zeros), is sent as
//
//   y = H D2 H D1 x
//   q_i = the level nearest to z_i = y_i sqrt(d) / |x|
//   u = |x| sqrt(d) / <z, q>
//
// and decoded as u D1 H D2 H q. H is the Hadamard matrix over sqrt(d), D1 and D2 are diagonals of
// signs. The code of an element is its level's number, with its sign in the highest bit. Only the
// signs are random; they make it unbiased. One rotation would suffice for most buckets, but not for
// those with few large elements, which it maps to few magnitudes for any signs.
//
// A message can be decoded without further information: the signs are a hash of a seed, which
// replaces the lowest bits of u. This changes u by at most 2^-9, and by zero on average.
#include "quant/eden.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

#include "quant/code.h"
#include "quant/kernels.h"
#include "quant/philox.h"

namespace qsgd {
namespace {

EdenTable make_table(int bits) {
  EdenTable table{};
  const float* const level = lloyd_max(bits);
  const uint32_t levels = 1u << (bits - 1);
  for (uint32_t i = 0; i < levels; ++i) {
    table.values.set(i, bit_cast<uint32_t>(level[i]));
    table.values.set(levels + i, bit_cast<uint32_t>(-level[i]));
    const float more = eden_set_cells(bits, i, [&](uint32_t cell, float edge) {
      table.edges.set(cell, bit_cast<uint32_t>(edge));
    });
    if (i + 2 == levels) table.last_edge = bit_cast<uint32_t>(more);
  }
  return table;
}

const EdenTable& table_of(int bits) {
  static const EdenTable tables[] = {make_table(1), make_table(2), make_table(3), make_table(4),
                                     make_table(5), make_table(6), make_table(7), make_table(8)};
  return tables[bits - 1];
}

// Cache-aligned memory of a bucket's size; `other` is a second one, if requested.
class Workspace {
 public:
  template <class Scratch>
  Workspace(size_t size, bool twice, Scratch& scratch) : work(few_), other(nullptr) {
    constexpr size_t kLine = 64 / sizeof(float);
    if (size <= std::size(few_) && !twice) return;
    scratch.values.resize(2 * size + kLine);
    const auto address = reinterpret_cast<uintptr_t>(scratch.values.data()) / sizeof(float);
    work = scratch.values.data() + (kLine - address % kLine) % kLine;
    other = work + size;
  }
  float* work;
  float* other;

 private:
  alignas(64) float few_[512];
};

class Eden final : public BucketCode {
 public:
  constexpr Eden() : BucketCode({"eden", 1, 8, 1, kRotates, 0, 3}) {}

  size_t code_bytes(const CodecSpec& spec, size_t count) const override {
    const size_t rest = count % spec.bucket;
    const size_t sent = count - rest + (rest == 0 ? 0 : eden_size(rest));
    return sent / 8 * static_cast<size_t>(spec.bits);
  }

 private:
  bool encode_bucket(const float* x, size_t count, uint64_t first, const CodecSpec& spec,
                     const NoiseKey& key, float* scales, uint8_t* codes,
                     Scratch& scratch) const override {
    const size_t size = eden_size(count);
    Workspace workspace(size, size != count, scratch);
    if (size != count) {  // pad with zeros
      std::copy_n(x, count, workspace.other);
      std::fill_n(workspace.other + count, size - count, 0.0f);
      x = workspace.other;
    }
    const uint32_t seed = eden_seed(Philox(key), first);
    return code_padded<false>(x, size, seed, spec, workspace.work, scales, codes);
  }

  // The levels are at hand when a complete bucket has been coded, and are not decoded.
  bool keep_bucket(float* left, size_t count, uint64_t first, const CodecSpec& spec,
                   const NoiseKey& key, float* scales, uint8_t* codes,
                   Scratch& scratch) const override {
    const size_t size = eden_size(count);
    if (size == count) {
      const uint32_t seed = eden_seed(Philox(key), first);
      Workspace workspace(size, false, scratch);
      const bool finite = code_padded<true>(left, size, seed, spec, workspace.work, scales, codes);
      if (finite && scales[0] < kEdenMost) {
        const float unit = scales[0] / static_cast<float>(size);
        if (unit != 0) kernels().eden_restore[2](workspace.work, size, seed, unit, left);
        return true;
      }
    }
    return BucketCode::keep_bucket(left, count, first, spec, key, scales, codes, scratch);
  }

  // Codes `size` elements. Keep: `work` is what eden_values makes of the codes, if the scale is not
  // zero.
  template <bool Keep>
  static bool code_padded(const float* x, size_t size, uint32_t seed, const CodecSpec& spec,
                          float* work, float* scales, uint8_t* codes) {
    const Kernels& k = kernels();
    float lift = 1;
    float energy = k.eden_rotate(x, size, lift, seed, work);
    if (!(energy >= kEdenFaint && energy <= kEdenStrong)) {
      const uint32_t most = k.max_magnitude(x, size);
      if (most == 0 || most >= kInfinity) return send_none(most == 0, size, spec, scales, codes);
      lift = eden_lift(most);
      energy = k.eden_rotate(x, size, lift, seed, work);
    }
    const float d = static_cast<float>(size), grow = eden_grow(spec.bits);
    const float scale = grow * std::sqrt(d / energy) / d;
    const EdenTable& table = table_of(spec.bits);
    const float match = k.eden_code[Keep][spec.bits](work, size, scale, seed, table, codes);
    const float u = grow * std::sqrt(d * energy) / match / lift;
    if (u < kEdenLeast) return send_none(true, size, spec, scales, codes);
    scales[0] = eden_with_seed(u, seed);
    return true;
  }

  static bool send_none(bool finite, size_t size, const CodecSpec& spec, float* scales,
                        uint8_t* codes) {
    scales[0] = finite ? 0 : std::numeric_limits<float>::quiet_NaN();
    std::memset(codes, 0, size / 8 * static_cast<size_t>(spec.bits));
    return finite;
  }

  bool decode_bucket(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                     float* out, Scratch& scratch) const override {
    restore<false>(scales[0], codes, count, spec, out, scratch);
    return std::isfinite(scales[0]);
  }

  void add_bucket(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                  float* sum, Scratch& scratch) const override {
    restore<true>(scales[0], codes, count, spec, sum, scratch);
  }

  template <bool Add>
  static void restore(float scale, const uint8_t* codes, size_t count, const CodecSpec& spec,
                      float* out, Scratch& scratch) {
    if (scale == 0) {
      if (!Add) std::fill_n(out, count, 0.0f);
      return;
    }
    const Kernels& k = kernels();
    const size_t size = eden_size(count);
    const uint32_t seed = eden_seed_in(scale);
    const float unit = scale / static_cast<float>(size);
    const bool whole = size == count && scale < kEdenMost;
    Workspace workspace(size, !whole, scratch);
    k.eden_values[spec.bits](codes, size, seed, table_of(spec.bits), workspace.work);
    if (whole) return k.eden_restore[Add](workspace.work, size, seed, unit, out);
    float* const values = workspace.other;
    k.eden_restore[false](workspace.work, size, seed, unit, values);
    for (size_t i = 0; i < count; ++i) {
      // NaN is kept.
      const float value = values[i] > kLargestFloat    ? kLargestFloat
                          : values[i] < -kLargestFloat ? -kLargestFloat
                                                       : values[i];
      out[i] = Add ? out[i] + value : value;
    }
  }
};

}  // namespace

const Code& eden_code() {
  static constexpr Eden code;
  return code;
}

}  // namespace qsgd
