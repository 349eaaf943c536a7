// The loops of kernels.h over a vector type V (simd_*.h). A file per instruction set includes this
// behind its target pragma; everything is a template on V or always inlined, so that no code for
// one machine can be linked into the path of another.
#pragma once

#include "common/dtype.h"
#include "quant/kernels.h"
#include "quant/pack.h"

namespace qsgd {

// Memory is fetched this far ahead of its use, in floats. Of the two passes over a bucket the
// second, which has more to compute, fetches for both; a bare scan fetches for itself.
constexpr size_t kAhead = 2048;
constexpr size_t kAheadOfScan = 1024;
constexpr size_t kScan = 8192;

template <size_t Distance>
QSGD_INLINE void fetch_ahead(const float* x, size_t floats) {
  for (size_t i = 0; i < floats; i += 16) __builtin_prefetch(x + Distance + i);
}

// The five rounds on all blocks of a tile at once, which hides the latency of a round.
template <class V>
class Ars {
 public:
  using I = typename V::I;
  static constexpr int kBlocksPerVector = V::kLanes / 4;
  static constexpr int kVectors = kTileBlocks / kBlocksPerVector;

  QSGD_INLINE explicit Ars(const NoiseKey& key) : high_(counter_high(key)) {
    uint64_t low = key.seed, high = key.tensor;
    for (I& round : keys_) {
      round = V::spread128(low, high);
      low += 0x9E3779B97F4A7C15u;
      high += 0xBB67AE8584CAA73Bu;
    }
  }

  QSGD_INLINE void tile(uint64_t tile, I* out) const {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const uint64_t block = tile * kTileBlocks + static_cast<uint64_t>(i * kBlocksPerVector);
      out[i] = V::differ(V::count128(block, high_), keys_[0]);
    }
#pragma GCC unroll 8
    for (int round = 1; round < kArsRounds; ++round) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) out[i] = V::aes_round(out[i], keys_[round]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) out[i] = V::aes_last(out[i], keys_[kArsRounds]);
  }

 private:
  uint64_t high_;
  I keys_[kArsRounds + 1];
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
  const Ars<V> ars(key);
  for (size_t t = 0; t < tiles; ++t, out += kTile) {
    typename V::I blocks[Ars<V>::kVectors];
    ars.tile(first_tile + t, blocks);
    each_noise<V>(blocks, [&](int element, typename V::I noise) {
      uint32_t word[V::kLanes];
      V::store_ints(word, noise);
      for (int i = 0; i < V::kLanes; ++i) out[element + i] = static_cast<uint16_t>(word[i]);
    });
  }
}

template <class V>
uint32_t max_magnitude_loop(const float* x, size_t count) {
  using I = typename V::I;
  constexpr size_t kStep = 4 * V::kLanes;
  const I magnitude = V::spread(0x7fffffff);
  I most[4] = {V::spread(0), V::spread(0), V::spread(0), V::spread(0)};
  size_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    if (count >= kScan) fetch_ahead<kAheadOfScan>(x + i, kStep);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const I bits = V::load_ints(x + i + part * V::kLanes);
      most[part] = V::max(most[part], V::both(bits, magnitude));
    }
  }
  uint32_t lane[V::kLanes];
  V::store_ints(lane, V::max(V::max(most[0], most[1]), V::max(most[2], most[3])));
  uint32_t out = 0;
  for (const uint32_t m : lane) out = m > out ? m : out;
  for (; i < count; ++i) {
    const uint32_t m = bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    out = m > out ? m : out;
  }
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

template <class V, int Bits, bool Nearest>
void quantize_loop(const float* x, size_t tiles, float scale, const NoiseKey& key,
                   uint64_t first_tile, uint8_t* codes) {
  using I = typename V::I;
  constexpr int kLevels = (1 << (Bits - 1)) - 1;
  const typename V::F factor = V::spread(scale);
  const I half = V::spread(1 << 15);
  const Ars<V> ars(key);
  for (size_t t = 0; t < tiles; ++t, x += kTile, codes += 8 * Bits) {
    fetch_ahead<kAhead>(x, kTile);
    __builtin_prefetch(codes + kAhead, 1);
    I numbers[kTile / V::kLanes];
    if constexpr (Nearest) {
#pragma GCC unroll 16
      for (int i = 0; i < kTile / V::kLanes; ++i) {
        // One less below zero: ties move away from zero on both sides.
        const I number = V::round(V::mul(V::load(x + i * V::kLanes), factor));
        numbers[i] = V::add(V::add(number, half), V::template down_signed<31>(number));
      }
    } else {
      I blocks[Ars<V>::kVectors];
      ars.tile(first_tile + t, blocks);
      each_noise<V>(blocks, [&](int element, I noise) {
        const I number = V::round(V::mul(V::load(x + element), factor));
        numbers[element / V::kLanes] = V::add(number, noise);
      });
    }
    if constexpr (Bits == 8) {
      V::narrow(numbers, kLevels, codes);
    } else {
      alignas(64) uint8_t code[kTile];
      V::narrow(numbers, kLevels, code);
      pack_tile<Bits>(code, codes);
    }
  }
}

template <class V, int Bits, bool Add>
void dequantize_loop(const uint8_t* codes, size_t tiles, float unit, float* out) {
  const typename V::I levels = V::spread(-((1 << (Bits - 1)) - 1));
  const typename V::F factor = V::spread(unit);
  for (size_t t = 0; t < tiles; ++t, out += kTile, codes += 8 * Bits) {
    alignas(64) uint8_t unpacked[kTile];
    const uint8_t* code = codes;
    if constexpr (Bits != 8) {
      unpack_tile<Bits>(codes, unpacked);
      code = unpacked;
    }
    fetch_ahead<kAheadOfScan>(out, kTile);
#pragma GCC unroll 16
    for (int i = 0; i < kTile; i += V::kLanes) {
      typename V::F value = V::mul(V::to_float(V::add(V::widen(code + i), levels)), factor);
      if constexpr (Add) value = V::add(V::load(out + i), value);
      V::store(out + i, value);
    }
  }
}

template <class V>
void add_loop(float* y, const float* x, size_t count) {
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    V::store(y + i, V::add(V::load(y + i), V::load(x + i)));
  }
  for (; i < count; ++i) y[i] += x[i];
}

// Each step is a bijection of the state and, given the state, of the word.
constexpr uint32_t kStir = 0x9E3779B1u;

template <class V>
QSGD_INLINE typename V::I stir(typename V::I state, typename V::I word) {
  const typename V::I product = V::times(V::differ(state, word), V::spread(int32_t(kStir)));
  return V::differ(product, V::template down<15>(product));
}

QSGD_INLINE uint32_t stir_word(uint32_t state, uint32_t word) {
  const uint32_t product = (state ^ word) * kStir;
  return product ^ (product >> 15);
}

// Word i goes to lane i % 64; the lanes are then stirred into 16, and these in halves into two.
template <class V>
uint64_t hash_loop(const uint8_t* bytes, size_t size) {
  using I = typename V::I;
  constexpr int kWords = 64;
  constexpr int kVectors = kWords / V::kLanes;
  uint32_t lane[kWords];
  for (int i = 0; i < kWords; ++i) lane[i] = static_cast<uint32_t>(i + 1) * 0x85EBCA6Bu;
  I state[kVectors];
  for (int i = 0; i < kVectors; ++i) state[i] = V::load_ints(lane + i * V::kLanes);
  const auto take = [&](const uint8_t* from) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      state[i] = stir<V>(state[i], V::load_ints(from + i * V::kLanes * 4));
    }
  };
  size_t at = 0;
  for (; at + sizeof lane <= size; at += sizeof lane) take(bytes + at);
  if (at < size) {
    uint8_t rest[sizeof lane] = {};
    __builtin_memcpy(rest, bytes + at, size - at);
    take(rest);
  }
  for (int i = 0; i < kVectors; ++i) V::store_ints(lane + i * V::kLanes, state[i]);
  for (int i = 16; i < kWords; ++i) lane[i % 16] = stir_word(lane[i % 16], lane[i]);
  for (int half = 8; half >= 2; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = stir_word(lane[i], lane[i + half]);
  }
  return uint64_t{lane[0]} << 32 | lane[1];
}

template <class V, int Bits>
constexpr void fill_bits(Kernels& k) {
  k.quantize[0][Bits] = quantize_loop<V, Bits, false>;
  k.quantize[1][Bits] = quantize_loop<V, Bits, true>;
  k.dequantize[0][Bits] = dequantize_loop<V, Bits, false>;
  k.dequantize[1][Bits] = dequantize_loop<V, Bits, true>;
}

template <class V>
constexpr Kernels make_kernels(const char* name) {
  Kernels k{};
  k.name = name;
  k.max_magnitude = max_magnitude_loop<V>;
  k.sum_squares = sum_squares_loop<V>;
  k.noise = noise_loop<V>;
  fill_bits<V, 2>(k);
  fill_bits<V, 3>(k);
  fill_bits<V, 4>(k);
  fill_bits<V, 5>(k);
  fill_bits<V, 6>(k);
  fill_bits<V, 7>(k);
  fill_bits<V, 8>(k);
  k.add = add_loop<V>;
  k.hash = hash_loop<V>;
  return k;
}

}  // namespace qsgd
