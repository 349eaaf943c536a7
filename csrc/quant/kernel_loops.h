// Loops of kernels.h over a vector type V (simd_*.h). A file per instruction set includes this
// after its target pragma; everything is a template on V or always inlined, so that code for one
// machine cannot be linked into the path of another.
#pragma once

#include "common/dtype.h"
#include "quant/eden_loops.h"
#include "quant/kernels.h"
#include "quant/pack.h"
#include "quant/prefetch.h"

namespace qsgd {

// Executes each round for all blocks of a tile, which hides the latency of a round.
template <class V>
class Ars {
 public:
  using Blocks = typename V::Blocks;
  static constexpr int kBlocksPerVector = V::kLanes / 4;
  static constexpr int kVectors = kTileBlocks / kBlocksPerVector;

  QSGD_INLINE Ars(const NoiseKey& key, uint64_t first_tile) {
    uint64_t low = key.seed, high = key.tensor;
    for (Blocks& round : keys_) {
      round = V::spread128(low, high);
      low += 0x9E3779B97F4A7C15u;
      high += 0xBB67AE8584CAA73Bu;
    }
    for (int i = 0; i < kVectors; ++i) {
      const uint64_t block = first_tile * kTileBlocks + static_cast<uint64_t>(i * kBlocksPerVector);
      counters_[i] = V::count128(block, counter_high(key));
    }
  }

  // Writes the noise of the first tile, then of the next...
  QSGD_INLINE void next_tile(typename V::I* out) {
    Blocks blocks[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      blocks[i] = V::differ(counters_[i], keys_[0]);
      counters_[i] = V::later128(counters_[i], kTileBlocks);
    }
#pragma GCC unroll 8
    for (int round = 1; round < kArsRounds; ++round) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) blocks[i] = V::aes_round(blocks[i], keys_[round]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      out[i] = V::ints(V::aes_last(blocks[i], keys_[kArsRounds]));
    }
  }

 private:
  Blocks counters_[kVectors];
  Blocks keys_[kArsRounds + 1];
};

// Calls use(e, noise) for the vectors of a tile: the 16-bit noise of elements e, e + 1...
template <class V, class Use>
QSGD_INLINE void each_noise(const typename V::I* blocks, Use use) {
  constexpr int kPerHalf = 16 / V::kLanes;
  const typename V::I low = V::spread(0xffff);
#pragma GCC unroll 16
  for (int i = 0; i < 2 * kPerHalf; ++i) {
    const int element = 32 * (i / kPerHalf) + i % kPerHalf * V::kLanes;
    use(element, V::both(blocks[i], low));
    use(element + 16, V::template down<16>(blocks[i]));
  }
}

template <class V>
void noise_loop(const NoiseKey& key, uint64_t first_tile, size_t tiles, uint16_t* out) {
  Ars<V> ars(key, first_tile);
  for (size_t t = 0; t < tiles; ++t, out += kTile) {
    typename V::I blocks[Ars<V>::kVectors];
    ars.next_tile(blocks);
    each_noise<V>(blocks, [&](int element, typename V::I noise) {
      uint32_t word[V::kLanes];
      V::store_ints(word, noise);
      for (int i = 0; i < V::kLanes; ++i) out[element + i] = static_cast<uint16_t>(word[i]);
    });
  }
}

template <class V>
QSGD_INLINE typename V::I larger_magnitude(typename V::I most, typename V::F x) {
  return V::max(most, V::both(V::bits(x), V::spread(0x7fffffff)));
}

QSGD_INLINE uint32_t larger_magnitude(uint32_t most, float x) {
  const uint32_t magnitude = magnitude_bits(x);
  return magnitude > most ? magnitude : most;
}

template <class V, class Element>
QSGD_INLINE uint32_t max_magnitude_of(const Element* x, size_t count) {
  using I = typename V::I;
  constexpr size_t kStep = 4 * V::kLanes;
  I most[4] = {V::spread(0), V::spread(0), V::spread(0), V::spread(0)};
  size_t i = 0;
  for (; i + kStep <= count; i += kStep) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      most[part] = larger_magnitude<V>(most[part], V::load(x + i + part * V::kLanes));
    }
  }
  uint32_t out = V::largest(V::max(V::max(most[0], most[1]), V::max(most[2], most[3])));
  for (; i < count; ++i) out = larger_magnitude(out, static_cast<float>(x[i]));
  return out;
}

template <class V>
double sum_squares_loop(const float* x, size_t count) {
  constexpr int kSums = 32;
  constexpr int kWidth = V::kLanes / 2;
  typename V::D sums[kSums / kWidth];
  for (auto& sum : sums) sum = V::zeros();
  size_t i = 0;
  for (; i + kSums <= count; i += kSums) {
#pragma GCC unroll 16
    for (int part = 0; part < kSums / kWidth; ++part) {
      sums[part] = V::load_squares(x + i + part * kWidth, sums[part]);
    }
  }
  double lane[kSums];
  for (int part = 0; part < kSums / kWidth; ++part) V::store(lane + part * kWidth, sums[part]);
  for (int part = 0; i < count; ++i, ++part) lane[part] += double{x[i]} * double{x[i]};
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

// Codes consecutive tiles, with constants and counters in registers.
template <class V, int Bits, bool Nearest>
class Quantizer {
 public:
  using I = typename V::I;
  static constexpr int kVectors = kTile / V::kLanes;

  QSGD_INLINE Quantizer(const NoiseKey& key, uint64_t first_tile) : ars_(key, first_tile) {}

  // Leaves the levels above the 16 fractional bits in `numbers`.
  template <class Element>
  QSGD_INLINE void next_tile(const Element* x, typename V::F scale, uint8_t* codes, I* numbers) {
    __builtin_prefetch(codes + kAhead, 1);
    if constexpr (Nearest) {
      const I half = V::spread(1 << 15);
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        // One less for negative numbers: ties round away from zero on both sides.
        const I number = V::round(V::mul(V::load(x + i * V::kLanes), scale));
        numbers[i] = V::add(V::add(number, half), V::template down_signed<31>(number));
      }
    } else {
      I blocks[Ars<V>::kVectors];
      ars_.next_tile(blocks);
      each_noise<V>(blocks, [&](int element, I noise) {
        const I number = V::round(V::mul(V::load(x + element), scale));
        numbers[element / V::kLanes] = V::add(number, noise);
      });
    }
    if constexpr (V::kPacks && (Bits == 8 || Bits == 4 || Bits == 2)) {
      V::template pack<Bits>(numbers, codes);
    } else {
      alignas(64) uint8_t code[kTile];
      V::narrow(numbers, (1 << (Bits - 1)) - 1, code);
      pack_tile<Bits>(code, codes);
    }
  }

 private:
  Ars<V> ars_;
};

template <class V, int Bits, bool Nearest>
void quantize_loop(const float* x, size_t tiles, float scale, const NoiseKey& key,
                   uint64_t first_tile, uint8_t* codes) {
  Quantizer<V, Bits, Nearest> quantizer(key, first_tile);
  const typename V::F factor = V::spread(scale);
  typename V::I numbers[kTile / V::kLanes];
  for (size_t t = 0; t < tiles; ++t) {
    quantizer.next_tile(x + t * kTile, factor, codes + t * 8 * Bits, numbers);
  }
}

template <class V, int Bits, bool Nearest>
void quantize_keeping_loop(const float* x, size_t tiles, float scale, float unit,
                           const NoiseKey& key, uint64_t first_tile, uint8_t* codes, float* left,
                           const float* source) {
  Quantizer<V, Bits, Nearest> quantizer(key, first_tile);
  const typename V::F factor = V::spread(scale);
  const typename V::F down = V::spread(-unit);
  typename V::I numbers[kTile / V::kLanes];
  for (size_t t = 0; t < tiles; ++t, x += kTile, left += kTile, codes += 8 * Bits) {
    fetch_pages(source + t * kTile);
    fetch_pages(left);
    quantizer.next_tile(x, factor, codes, numbers);
#pragma GCC unroll 16
    for (int i = 0; i < kTile; i += V::kLanes) {
      const typename V::I level = V::template down_signed<16>(numbers[i / V::kLanes]);
      V::store(left + i, V::add(V::load(x + i), V::mul(V::to_float(level), down)));
    }
  }
}

template <class V, class Element>
uint32_t scale_add_loop(const void* from, size_t count, float by, const float* left, float* to,
                        bool fetch) {
  const auto* const x = static_cast<const Element*>(from);
  const typename V::F factor = V::spread(by);
  typename V::I most = V::spread(0);
  size_t i = 0;
  for (; i + kTile <= count; i += kTile) {
    if (fetch) {
      fetch_pages(x + i);
      fetch_pages(left + i);
    }
#pragma GCC unroll 16
    for (int part = 0; part < kTile; part += V::kLanes) {
      const typename V::F scaled = V::mul(V::load(x + i + part), factor);
      const typename V::F value = V::add(scaled, V::load(left + i + part));
      most = larger_magnitude<V>(most, value);
      V::store(to + i + part, value);
    }
  }
  uint32_t out = V::largest(most);
  for (; i < count; ++i) {
    Element last;
    __builtin_memcpy(&last, x + i, sizeof last);
    to[i] = static_cast<float>(last) * by + left[i];
    out = larger_magnitude(out, to[i]);
  }
  return out;
}

template <class V>
uint64_t variance_loop(const float* x, size_t tiles, float scale) {
  using I = typename V::I;
  const typename V::F factor = V::spread(scale);
  const I half = V::spread(0xffff);
  I low = V::spread(0), high = V::spread(0);  // of the products; each lane adds up at most 2^14
  for (size_t i = 0; i < tiles * kTile; i += V::kLanes) {
    const I f = V::both(V::round(V::mul(V::load(x + i), factor)), half);
    const I product = V::add(V::times(f, V::differ(f, half)), f);
    low = V::add(low, V::both(product, half));
    high = V::add(high, V::template down<16>(product));
  }
  uint32_t lanes[2][V::kLanes];
  V::store_ints(lanes[0], low);
  V::store_ints(lanes[1], high);
  uint64_t sum = 0;
  for (int i = 0; i < V::kLanes; ++i) sum += lanes[0][i] + (uint64_t{lanes[1][i]} << 16);
  return sum;
}

template <class V, class Element, int Bits, bool Nearest>
size_t quantize_buckets_loop(const void* from, size_t buckets, size_t bucket_tiles,
                             const NoiseKey& key, uint64_t first_tile, float* norms,
                             uint8_t* codes) {
  const auto* x = static_cast<const Element*>(from);
  const size_t bucket = bucket_tiles * kTile;
  Quantizer<V, Bits, Nearest> quantizer(key, first_tile);
  uint32_t most = buckets > 0 ? max_magnitude_of<V>(x, bucket) : 0;
  for (size_t b = 0; b < buckets; ++b) {
    const float norm = bit_cast<float>(most);
    const float scale = whole_scale((1 << (Bits - 1)) - 1) / norm;
    if (!is_plain(scale)) return b;
    norms[b] = norm;
    const typename V::F factor = V::spread(scale);
    // Scans the next bucket meanwhile, so that loads and arithmetic of both passes overlap.
    const Element* const next = b + 1 < buckets ? x + bucket : x;
    typename V::I ahead = V::spread(0);
    typename V::I numbers[kTile / V::kLanes];
    for (size_t at = 0; at < bucket; at += kTile, codes += 8 * Bits) {
      fetch_pages(x + at);
      quantizer.next_tile(x + at, factor, codes, numbers);
#pragma GCC unroll 16
      for (int i = 0; i < kTile; i += V::kLanes) {
        ahead = larger_magnitude<V>(ahead, V::load(next + at + i));
      }
    }
    most = V::largest(ahead);
    x += bucket;
  }
  return buckets;
}

template <class V, int Bits, bool Add, class Element>
void dequantize_loop(const uint8_t* codes, size_t tiles, float unit, void* to) {
  auto* out = static_cast<Element*>(to);
  const typename V::I levels = V::spread(-((1 << (Bits - 1)) - 1));
  const typename V::F factor = V::spread(unit);
  for (size_t t = 0; t < tiles; ++t, out += kTile, codes += 8 * Bits) {
    alignas(64) uint8_t unpacked[kTile];
    const uint8_t* code = codes;
    if constexpr (Bits != 8) {
      unpack_tile<Bits>(codes, unpacked);
      code = unpacked;
    }
    fetch_for_writing(out);
#pragma GCC unroll 16
    for (int i = 0; i < kTile; i += V::kLanes) {
      typename V::F value = V::mul(V::to_float(V::add(V::widen(code + i), levels)), factor);
      if constexpr (Add) value = V::add(V::load(out + i), value);
      V::store(out + i, value);
    }
  }
}

// Converts a 16-bit type to float32; the last elements separately.
template <class V, class Short>
uint32_t widen_loop(const void* from, size_t count, float* to) {
  const auto* const x = static_cast<const Short*>(from);
  typename V::I most = V::spread(0);
  size_t i = 0;
  for (; i + kTile <= count; i += kTile) {
    fetch_pages(x + i);
#pragma GCC unroll 16
    for (int part = 0; part < kTile; part += V::kLanes) {
      const typename V::F value = V::load(x + i + part);
      most = larger_magnitude<V>(most, value);
      V::store(to + i + part, value);
    }
  }
  uint32_t out = V::largest(most);
  for (; i < count; ++i) {
    Short last;
    __builtin_memcpy(&last, x + i, sizeof last);
    to[i] = static_cast<float>(last);
    out = larger_magnitude(out, to[i]);
  }
  return out;
}

template <class V, class Short>
uint32_t shorten_loop(const float* from, size_t count, void* to) {
  auto* const y = static_cast<Short*>(to);
  typename V::I most = V::spread(0);
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    const typename V::F value = V::load(from + i);
    most = larger_magnitude<V>(most, value);
    V::store(y + i, value);
  }
  uint32_t out = V::largest(most);
  for (; i < count; ++i) {
    const Short last(from[i]);
    __builtin_memcpy(y + i, &last, sizeof last);
    out = larger_magnitude(out, from[i]);
  }
  return out;
}

template <class V>
void add_loop(float* y, const float* x, size_t count) {
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    V::store(y + i, V::add(V::load(y + i), V::load(x + i)));
  }
  for (; i < count; ++i) y[i] += x[i];
}

template <class V>
QSGD_INLINE typename V::I absorb(typename V::I state, typename V::I word) {
  const typename V::I product = V::times(V::differ(state, word), V::spread(int32_t(kMix)));
  return V::differ(product, V::template down<15>(product));
}

template <class V>
void hash_take_loop(HashLanes& lanes, const uint8_t* bytes, size_t rows) {
  using I = typename V::I;
  constexpr int kVectors = kHashRow / sizeof(I);
  I state[kVectors];
  for (int i = 0; i < kVectors; ++i) state[i] = V::load_ints(lanes.word + i * V::kLanes);
  for (; rows > 0; --rows, bytes += kHashRow) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      state[i] = absorb<V>(state[i], V::load_ints(bytes + i * V::kLanes * 4));
    }
  }
  for (int i = 0; i < kVectors; ++i) V::store_ints(lanes.word + i * V::kLanes, state[i]);
}

template <class V, int Bits>
void pack_loop(const uint8_t* code, size_t tiles, uint8_t* out) {
  for (size_t t = 0; t < tiles; ++t) pack_tile<Bits>(code + t * kTile, out + t * 8 * Bits);
}

template <class V, int Bits>
void unpack_loop(const uint8_t* in, size_t tiles, uint8_t* code) {
  for (size_t t = 0; t < tiles; ++t) unpack_codes<V, Bits>(in + t * 8 * Bits, code + t * kTile);
}

template <class V, int Bits>
constexpr void fill_bits(Kernels& k) {
  k.pack[Bits] = pack_loop<V, Bits>;
  k.unpack[Bits] = unpack_loop<V, Bits>;
  k.eden_code[0][Bits] = eden_code_loop<V, Bits, false>;
  k.eden_code[1][Bits] = eden_code_loop<V, Bits, true>;
  k.eden_values[Bits] = eden_values_loop<V, Bits>;
  if constexpr (Bits > 1) {  // of QSGD, which has a sign and a level
    k.quantize[0][Bits] = quantize_loop<V, Bits, false>;
    k.quantize[1][Bits] = quantize_loop<V, Bits, true>;
    k.quantize_keeping[0][Bits] = quantize_keeping_loop<V, Bits, false>;
    k.quantize_keeping[1][Bits] = quantize_keeping_loop<V, Bits, true>;
    k.quantize_buckets[0][0][Bits] = quantize_buckets_loop<V, float, Bits, false>;
    k.quantize_buckets[0][1][Bits] = quantize_buckets_loop<V, float, Bits, true>;
    k.quantize_buckets[1][0][Bits] = quantize_buckets_loop<V, Float16, Bits, false>;
    k.quantize_buckets[1][1][Bits] = quantize_buckets_loop<V, Float16, Bits, true>;
    k.quantize_buckets[2][0][Bits] = quantize_buckets_loop<V, BFloat16, Bits, false>;
    k.quantize_buckets[2][1][Bits] = quantize_buckets_loop<V, BFloat16, Bits, true>;
    k.dequantize[0][Bits] = dequantize_loop<V, Bits, false, float>;
    k.dequantize[1][Bits] = dequantize_loop<V, Bits, false, Float16>;
    k.dequantize[2][Bits] = dequantize_loop<V, Bits, false, BFloat16>;
    k.dequantize_add[Bits] = dequantize_loop<V, Bits, true, float>;
    fill_bits<V, Bits - 1>(k);
  }
}

template <class V>
constexpr Kernels make_kernels(const char* name) {
  Kernels k{};
  k.name = name;
  k.max_magnitude = max_magnitude_of<V, float>;
  k.sum_squares = sum_squares_loop<V>;
  k.noise = noise_loop<V>;
  k.scale_add[0] = scale_add_loop<V, float>;
  k.scale_add[1] = scale_add_loop<V, Float16>;
  k.scale_add[2] = scale_add_loop<V, BFloat16>;
  k.variance = variance_loop<V>;
  k.widen[0] = widen_loop<V, Float16>;
  k.widen[1] = widen_loop<V, BFloat16>;
  k.shorten[0] = shorten_loop<V, Float16>;
  k.shorten[1] = shorten_loop<V, BFloat16>;
  k.add = add_loop<V>;
  k.hash_take = hash_take_loop<V>;
  k.eden_rotate = eden_rotate_loop<V>;
  k.eden_restore[0] = eden_restore_loop<V, Into::kSet>;
  k.eden_restore[1] = eden_restore_loop<V, Into::kAdd>;
  k.eden_restore[2] = eden_restore_loop<V, Into::kSubtract>;
  fill_bits<V, 8>(k);
  return k;
}

}  // namespace qsgd
