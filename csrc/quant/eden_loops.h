// Loops of EDEN (eden.cc) over a vector type, like those of kernel_loops.h.
//
// All instruction sets round alike because every sum has a fixed order: one rotation is butterflies
// with increasing distances 1, 2, 4..., the other with decreasing ones, and sums are trees
// (TreeSum). Distances within a group of elements take one pass, in registers; for larger ones,
// turn() handles both rotations together, in memory that fits in the caches.
#pragma once

#include <type_traits>

#include "quant/eden.h"
#include "quant/kernels.h"
#include "quant/pack.h"
#include "quant/prefetch.h"

namespace qsgd {

// Lambdas must be inlined to keep a loop's values in registers.
#define QSGD_INLINE_LAMBDA __attribute__((always_inline))

constexpr int kSumLanes = 16;

// Butterflies between the vectors, with increasing or decreasing distances.
template <class V, int Count, int Distance>
QSGD_INLINE void cross_vectors(typename V::F* v) {
#pragma GCC unroll 16
  for (int i = 0; i < Count; ++i) {
    if ((i & Distance) != 0) continue;
    const typename V::F a = v[i], b = v[i + Distance];
    v[i] = V::add(a, b);
    v[i + Distance] = V::sub(a, b);
  }
}

template <class V, int Count, int Distance = 1>
QSGD_INLINE void rise_vectors(typename V::F* v) {
  if constexpr (Distance < Count) {
    cross_vectors<V, Count, Distance>(v);
    rise_vectors<V, Count, 2 * Distance>(v);
  }
}

template <class V, int Count, int Distance = Count / 2>
QSGD_INLINE void fall_vectors(typename V::F* v) {
  if constexpr (Distance > 0) {
    cross_vectors<V, Count, Distance>(v);
    fall_vectors<V, Count, Distance / 2>(v);
  }
}

// Packs a tile's codes, numbers below 256, as fields of `Bits` bits.
template <class V, int Bits>
QSGD_INLINE void pack_codes(const typename V::I* code_of, uint8_t* out) {
  if constexpr (V::kPacksCodes) {
    V::template pack_codes<Bits>(code_of, out);
  } else {
    constexpr int kCount = kTile / V::kLanes;
    typename V::I numbers[kCount];
    for (int i = 0; i < kCount; ++i) numbers[i] = V::template up<16>(code_of[i]);
    alignas(64) uint8_t code[kTile];
    V::narrow(numbers, 0, code);
    pack_tile<Bits>(code, out);
  }
}

// The inverse, to one byte per code.
template <class V, int Bits>
QSGD_INLINE void unpack_codes(const uint8_t* in, uint8_t* code) {
  if constexpr (V::kPacksCodes) {
    V::template unpack_codes<Bits>(in, code);
  } else {
    unpack_tile<Bits>(in, code);
  }
}

template <class V, int Distance = 1>
QSGD_INLINE typename V::F rise_lanes(typename V::F x) {
  if constexpr (Distance == V::kLanes) {
    return x;
  } else {
    return rise_lanes<V, 2 * Distance>(V::template cross<Distance>(x));
  }
}

template <class V, int Distance = V::kLanes / 2>
QSGD_INLINE typename V::F fall_lanes(typename V::F x) {
  if constexpr (Distance == 0) {
    return x;
  } else {
    return fall_lanes<V, Distance / 2>(V::template cross<Distance>(x));
  }
}

// A sum as a tree that suits both vectors and a GPU's lanes: rows of kSumLanes elements in pairs
// within a tile, then tiles in pairs, then the remaining lanes, in halves.
template <class V>
class TreeSum {
 public:
  static constexpr int kParts = kSumLanes / V::kLanes;  // vectors per row

  // Adds the next tile's terms.
  QSGD_INLINE void add(const typename V::F* terms) {
    typename V::F row[kParts];
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      row[part] = V::add(V::add(terms[part], terms[kParts + part]),
                         V::add(terms[2 * kParts + part], terms[3 * kParts + part]));
    }
    level_ = 0;
    for (unsigned left = tiles_++; (left & 1) != 0; left >>= 1, ++level_) {
      for (int part = 0; part < kParts; ++part) {
        row[part] = V::add(V::load(sums_[level_] + part * V::kLanes), row[part]);
      }
    }
    for (int part = 0; part < kParts; ++part) {
      V::store(sums_[level_] + part * V::kLanes, row[part]);
    }
  }
  // The number of tiles must be a power of two.
  QSGD_INLINE float total() const {
    const float* const row = sums_[level_];
    typename V::F parts[kParts];
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) parts[part] = V::load(row + part * V::kLanes);
#pragma GCC unroll 2
    for (int half = kParts / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) parts[i] = V::add(parts[i], parts[i + half]);
    }
    float lanes[V::kLanes];
    V::store(lanes, fall_lanes<V>(parts[0]));
    return lanes[0];
  }

 private:
  static constexpr int kMostLevels = 11;  // for 2^10 tiles
  alignas(64) float sums_[kMostLevels][kSumLanes];
  unsigned tiles_ = 0;
  int level_ = 0;
};

// The signs of successive vectors of elements.
template <class V>
class Signs {
 public:
  static constexpr int kVectors = kSignWords / V::kLanes;

  QSGD_INLINE explicit Signs(const uint32_t* words) : next_(words) { load(); }
  // Called before each group of elements, with its first element.
  QSGD_INLINE void at(size_t element) {
    if (element > 0 && element % kSignBlock == 0) load();
  }
  QSGD_INLINE typename V::F flip(int vector, typename V::F x) {
    typename V::I& word = words_[vector % kVectors];
    const typename V::F flipped = V::flip(x, word);
    word = V::add(word, word);
    return flipped;
  }

 private:
  QSGD_INLINE void load() {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) words_[i] = V::load_ints(next_ + i * V::kLanes);
    next_ += kSignWords;
  }

  const uint32_t* next_;
  typename V::I words_[kVectors];
};

template <class V>
QSGD_INLINE void sign_words(uint32_t seed, uint32_t which, size_t size, uint32_t* words) {
  using I = typename V::I;
  alignas(64) uint32_t count[V::kLanes];
  for (int i = 0; i < V::kLanes; ++i) count[i] = static_cast<uint32_t>(i);
  const I counter = V::load_ints(count);
  const size_t blocks = (size + kSignBlock - 1) / kSignBlock;
  for (size_t i = 0; i < blocks * kSignWords; i += V::kLanes) {
    const uint32_t first = eden_sign_counter(seed, which, static_cast<uint32_t>(i));
    I x = V::add(counter, V::spread(int32_t(first)));
    x = V::times(V::differ(x, V::template down<16>(x)), V::spread(int32_t(kSignHash1)));
    x = V::times(V::differ(x, V::template down<15>(x)), V::spread(int32_t(kSignHash2)));
    V::store_ints(words + i, V::differ(x, V::template down<16>(x)));
  }
}

// Vectors per group: complete tiles, as many as fit in registers.
template <class V>
constexpr int kGroup = V::kLanes < 8 ? 16 : 8;

// Calls load(element, v) for the vectors v of each group, and writes the result of the increasing
// butterflies within the group.
template <class V, int Count, class Load>
QSGD_INLINE void rise(size_t size, float* work, const Load& load) {
  for (size_t at = 0; at < size; at += Count * V::kLanes) {
    typename V::F v[Count];
    load(at, v);
#pragma GCC unroll 16
    for (int i = 0; i < Count; ++i) v[i] = rise_lanes<V>(v[i]);
    rise_vectors<V, Count>(v);
#pragma GCC unroll 16
    for (int i = 0; i < Count; ++i) V::store(work + at + i * V::kLanes, v[i]);
  }
}

// Calls store(element, v) with the result of the decreasing butterflies within each group.
template <class V, int Count, class Store>
QSGD_INLINE void fall(const float* work, size_t size, const Store& store) {
  for (size_t at = 0; at < size; at += Count * V::kLanes) {
    typename V::F v[Count];
#pragma GCC unroll 16
    for (int i = 0; i < Count; ++i) v[i] = V::load(work + at + i * V::kLanes);
    fall_vectors<V, Count>(v);
#pragma GCC unroll 16
    for (int i = 0; i < Count; ++i) v[i] = fall_lanes<V>(v[i]);
    store(at, v);
  }
}

// Butterflies between `Count` vectors `distance` elements apart, over the complete bucket. kTurn:
// increasing, then the second signs, then decreasing.
enum class Way { kRise, kTurn, kFall };

template <class V, int Count, Way kWay>
QSGD_INLINE void stride(float* work, size_t size, size_t distance, const uint32_t* words) {
  constexpr int kParts = kSignWords / V::kLanes;
  for (size_t block = 0; block < size; block += Count * distance) {
    for (size_t at = block; at < block + distance; at += kSignBlock) {
      // The signs at this position and at each distance from it.
      typename V::I signs[kWay == Way::kTurn ? Count * kParts : 1];
      if constexpr (kWay == Way::kTurn) {
#pragma GCC unroll 32
        for (int i = 0; i < Count * kParts; ++i) {
          const size_t element = at + i / kParts * distance;
          const uint32_t* const word =
              words + element / kSignBlock * kSignWords + i % kParts * V::kLanes;
          const auto row = static_cast<int>(element % kSignBlock / kSignWords);
          signs[i] = V::up(V::load_ints(word), row);
        }
      }
      const size_t end = at + kSignBlock < block + distance ? at + kSignBlock : block + distance;
      for (size_t row = at; row < end; row += kSignWords) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
          float* const from = work + row + part * V::kLanes;
          typename V::F v[Count];
#pragma GCC unroll 8
          for (int i = 0; i < Count; ++i) v[i] = V::load(from + i * distance);
          if constexpr (kWay != Way::kFall) rise_vectors<V, Count>(v);
          if constexpr (kWay == Way::kTurn) {
#pragma GCC unroll 8
            for (int i = 0; i < Count; ++i) {
              typename V::I& sign = signs[i * kParts + part];
              v[i] = V::flip(v[i], sign);
              sign = V::add(sign, sign);
            }
          }
          if constexpr (kWay != Way::kRise) fall_vectors<V, Count>(v);
#pragma GCC unroll 8
          for (int i = 0; i < Count; ++i) V::store(from + i * distance, v[i]);
        }
      }
    }
  }
}

// All butterflies with distances of at least `group` elements: increasing, signs, decreasing. Not
// inlined: it is the largest part of the loops below, and the same for all bits.
template <class V>
__attribute__((noinline)) void turn(float* work, size_t size, size_t group, const uint32_t* words) {
  size_t distance = group;
  for (; size / distance > 8; distance *= 8) stride<V, 8, Way::kRise>(work, size, distance, words);
  switch (size / distance) {
    case 8:
      stride<V, 8, Way::kTurn>(work, size, distance, words);
      break;
    case 4:
      stride<V, 4, Way::kTurn>(work, size, distance, words);
      break;
    case 2:
      stride<V, 2, Way::kTurn>(work, size, distance, words);
      break;
    default:
      stride<V, 1, Way::kTurn>(work, size, distance, words);
  }
  while (distance > group) {
    distance /= 8;
    stride<V, 8, Way::kFall>(work, size, distance, words);
  }
}

constexpr size_t kMostWords = (1u << 16) / 32;  // for the largest bucket

// Calls f with the vectors per group for this bucket size, as a type: a bucket of 64 elements may
// be smaller than a group.
template <class V, class F>
QSGD_INLINE void with_group(size_t size, const F& f) {
  if constexpr (kGroup<V> * V::kLanes > kTile) {
    if (size == kTile) return f(std::integral_constant<int, kTile / V::kLanes>());
  }
  f(std::integral_constant<int, kGroup<V>>());
}

template <class V>
float eden_rotate_loop(const float* x, size_t size, float lift, uint32_t seed, float* work) {
  alignas(64) uint32_t words[2][kMostWords];
  for (uint32_t which = 0; which < 2; ++which) sign_words<V>(seed, which, size, words[which]);
  const typename V::F factor = V::spread(lift);
  TreeSum<V> squares;
  Signs<V> signs(words[0]);
  with_group<V>(size, [&](auto group) QSGD_INLINE_LAMBDA {
    constexpr int kCount = decltype(group)::value;
    rise<V, kCount>(size, work, [&](size_t at, typename V::F* v) QSGD_INLINE_LAMBDA {
      signs.at(at);
      fetch_pages(x + at);
      if constexpr (kCount * V::kLanes > kTile) fetch_pages(x + at + kTile);
      typename V::F square[kCount];
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) {
        const typename V::F value = V::mul(V::load(x + at + i * V::kLanes), factor);
        square[i] = V::mul(value, value);
        v[i] = signs.flip(i, value);
      }
#pragma GCC unroll 2
      for (int i = 0; i < kCount; i += kTile / V::kLanes) squares.add(square + i);
    });
    turn<V>(work, size, kCount * V::kLanes, words[1]);
  });
  return squares.total();
}

// Codes a tile of magnitudes in cells, z their numbers with signs, and sets their levels' values.
template <class V, int Bits>
QSGD_INLINE void code_tile(const typename V::I* z, const typename V::I* magnitude,
                           const EdenTable& table, typename V::I* value, uint8_t* codes) {
  using I = typename V::I;
  constexpr int kCells = eden_cells(Bits), kLevels = (1 << Bits) / 2;
  constexpr int kOfTile = kTile / V::kLanes;
  I cell[kOfTile], edge[kOfTile];
#pragma GCC unroll 16
  for (int i = 0; i < kOfTile; ++i) cell[i] = V::round(V::of_bits(magnitude[i]));
  if constexpr (V::kLooksUpBytes && kCells > 2 * V::kLookup) {
    const I cells = V::template saturated<kCells - 1>(cell);
    I level = V::template lookup_bytes<kCells>(table.edges.bytes, cells, edge);
#pragma GCC unroll 16
    for (int i = 0; i < kOfTile; ++i) edge[i] = V::sub(edge[i], magnitude[i]);
    level = V::count_signs(level, V::saturated(edge));
    if (Bits == 8 && V::has_byte(cells, kCells - 1)) {
#pragma GCC unroll 16
      for (int i = 0; i < kOfTile; ++i) {
        edge[i] = V::sub(V::spread(int32_t(table.last_edge)), magnitude[i]);
      }
      level = V::count_signs(level, V::saturated(edge));
    }
    V::template lookup_bytes<kLevels>(table.values.bytes, level, value);
    const I sign = V::template down<8 - Bits>(V::saturated(z));
    const I code = V::select(V::spread((kLevels - 1) * 0x01010101), level, sign);
    V::template pack_bytes<Bits>(V::reorder(code), codes);
  } else {
    I level[kOfTile];
#pragma GCC unroll 16
    for (int i = 0; i < kOfTile; ++i) {
      level[i] = V::spread(0);  // bits above the lowest byte are arbitrary
      if constexpr (Bits > 1) {
        edge[i] =
            V::template lookup<kCells>(table.edges.entries, V::min(cell[i], V::spread(kCells - 1)));
        level[i] = V::count_above(edge[i], magnitude[i], edge[i]);
      }
      if constexpr (Bits == 8) {
        level[i] = V::count_above(level[i], magnitude[i], V::spread(int32_t(table.last_edge)));
      }
      value[i] = V::template lookup<kLevels>(table.values.entries, level[i]);
      level[i] = V::select(V::spread(kLevels - 1), level[i], V::template down<32 - Bits>(z[i]));
    }
    pack_codes<V, Bits>(level, codes);
  }
}

template <class V, int Bits, bool Keep>
float eden_code_loop(float* work, size_t size, float scale, uint32_t seed, const EdenTable& table,
                     uint8_t* codes) {
  using F = typename V::F;
  using I = typename V::I;
  constexpr int kOfTile = kTile / V::kLanes;
  const F factor = V::spread(scale);
  TreeSum<V> match;
  // Codes a tile, and returns its levels with their signs.
  const auto code = [&](const F* v, F* signed_level) QSGD_INLINE_LAMBDA {
    I z[kOfTile], magnitude[kOfTile], value[kOfTile];
#pragma GCC unroll 16
    for (int i = 0; i < kOfTile; ++i) {
      z[i] = V::bits(V::mul(v[i], factor));
      magnitude[i] = V::both(z[i], V::spread(0x7fffffff));
    }
    code_tile<V, Bits>(z, magnitude, table, value, codes);
    codes += 8 * Bits;
    F product[kOfTile];
#pragma GCC unroll 16
    for (int i = 0; i < kOfTile; ++i) {
      product[i] = V::mul(V::of_bits(magnitude[i]), V::of_bits(value[i]));
      signed_level[i] = V::flip(V::of_bits(value[i]), z[i]);
    }
    match.add(product);
  };
  with_group<V>(size, [&](auto group) QSGD_INLINE_LAMBDA {
    constexpr int kCount = decltype(group)::value;
    fall<V, kCount>(work, size, [&](size_t at, const F* v) QSGD_INLINE_LAMBDA {
      F signed_level[kCount];
#pragma GCC unroll 2
      for (int i = 0; i < kCount; i += kOfTile) code(v + i, signed_level + i);
      if constexpr (Keep) {  // the group at `at` has been loaded completely
        rise<V, kCount>(kCount * V::kLanes, work + at, [&](size_t, F* risen) QSGD_INLINE_LAMBDA {
#pragma GCC unroll 16
          for (int i = 0; i < kCount; ++i) risen[i] = signed_level[i];
        });
      }
    });
    if constexpr (Keep) {
      alignas(64) uint32_t words[kMostWords];
      sign_words<V>(seed, 1, size, words);
      turn<V>(work, size, kCount * V::kLanes, words);
    }
  });
  return match.total();
}

// A tile's values of codes, one byte each; a large table is searched among the levels above zero
// only.
template <class V, int Bits>
QSGD_INLINE void levels_of(const uint8_t* code, const EdenTable& table, typename V::F* level) {
  using I = typename V::I;
  constexpr int kOfTile = kTile / V::kLanes, kLevels = (1 << Bits) / 2;
  if constexpr (V::kLooksUpBytes && (1 << Bits) > 2 * V::kLookup) {
    I value[kOfTile];
    V::template lookup_bytes<1 << Bits>(table.values.bytes, V::reorder(V::load_ints(code)), value);
#pragma GCC unroll 16
    for (int i = 0; i < kOfTile; ++i) level[i] = V::of_bits(value[i]);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kOfTile; ++i) {
      const I one = V::widen(code + i * V::kLanes);
      if constexpr ((1 << Bits) <= V::kLookup) {
        level[i] = V::of_bits(V::template lookup<1 << Bits>(table.values.entries, one));
      } else {
        const I number = V::both(one, V::spread(kLevels - 1));
        const I value = V::template lookup<kLevels>(table.values.entries, number);
        level[i] = V::flip(V::of_bits(value), V::template up<32 - Bits>(one));
      }
    }
  }
}

template <class V, int Bits>
void eden_values_loop(const uint8_t* codes, size_t size, uint32_t seed, const EdenTable& table,
                      float* work) {
  alignas(64) uint32_t words[kMostWords];
  sign_words<V>(seed, 1, size, words);
  with_group<V>(size, [&](auto group) QSGD_INLINE_LAMBDA {
    constexpr int kCount = decltype(group)::value;
    rise<V, kCount>(size, work, [&](size_t /*at*/, typename V::F* v) QSGD_INLINE_LAMBDA {
      alignas(64) uint8_t code[kCount * V::kLanes];
#pragma GCC unroll 2
      for (int i = 0; i < kCount * V::kLanes; i += kTile, codes += 8 * Bits) {
        unpack_codes<V, Bits>(codes, code + i);
      }
#pragma GCC unroll 2
      for (int i = 0; i < kCount; i += kTile / V::kLanes) {
        levels_of<V, Bits>(code + i * V::kLanes, table, v + i);
      }
    });
    turn<V>(work, size, kCount * V::kLanes, words);
  });
}

enum class Into { kSet, kAdd, kSubtract };

template <class V, Into kInto>
void eden_restore_loop(const float* work, size_t size, uint32_t seed, float unit, float* out) {
  alignas(64) uint32_t words[kMostWords];
  sign_words<V>(seed, 0, size, words);
  const typename V::F factor = V::spread(unit);
  Signs<V> signs(words);
  with_group<V>(size, [&](auto group) QSGD_INLINE_LAMBDA {
    constexpr int kCount = decltype(group)::value;
    fall<V, kCount>(work, size, [&](size_t at, const typename V::F* v) QSGD_INLINE_LAMBDA {
      signs.at(at);
      fetch_for_writing(out + at);
      if constexpr (kCount * V::kLanes > kTile) fetch_for_writing(out + at + kTile);
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) {
        float* const to = out + at + i * V::kLanes;
        const typename V::F value = V::mul(signs.flip(i, v[i]), factor);
        if constexpr (kInto == Into::kSet) V::store(to, value);
        if constexpr (kInto == Into::kAdd) V::store(to, V::add(V::load(to), value));
        if constexpr (kInto == Into::kSubtract) V::store(to, V::sub(V::load(to), value));
      }
    });
  });
}

}  // namespace qsgd
