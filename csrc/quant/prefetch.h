// Prefetching for the loops of the codec.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/clones.h"
#include "quant/noise.h"

namespace qsgd {

// Memory is prefetched to the L2 cache a block of pages ahead of its use, from the pages of a block
// in turn: hardware prefetches, too, but within one page at a time, and eight such streams transfer
// a third more than one. Of the two passes over a bucket, the second, which computes more,
// prefetches for both.
constexpr size_t kPage = 4096;  // bytes
constexpr size_t kPages = 8;

// Prefetches the part of the next block that corresponds to the tile at x. Addresses beyond the
// data are harmless.
template <class T>
QSGD_INLINE void fetch_pages(const T* x) {
  constexpr uintptr_t kBytes = kTile * sizeof(T);
  const auto tile = reinterpret_cast<uintptr_t>(x);
  const uintptr_t place = tile % (kPages * kPage) / kBytes;
  const uintptr_t block = tile - place * kBytes + kPages * kPage;
  const uintptr_t line = block + place % kPages * kPage + place / kPages * kBytes;
  for (uintptr_t i = 0; i < kBytes; i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(line + i), 0, 2);
  }
}

// For memory that is written, closer to its use.
constexpr size_t kAhead = 1024;

template <class T>
QSGD_INLINE void fetch_for_writing(const T* to) {
  for (size_t i = 0; i < kTile * sizeof(T); i += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(to + kAhead) + i, 1);
  }
}

}  // namespace qsgd
