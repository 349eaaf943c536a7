// Ownership of elements: pure functions, equal on every rank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/range.h"

namespace qsgd {

// Of a message of a pipeline of exact elements: large compared with the cost of a message, small
// enough to be summed in cache.
constexpr size_t kSegmentBytes = size_t{256} << 10;

// The elements of tensor `id` that `rank` sums. Each tensor is partitioned separately, so that the
// result of a step does not depend on which tensors were fused. The partition is rotated by the id,
// so that small tensors are not all owned by the same rank.
inline Range owned(size_t count, size_t granule, uint32_t id, int size, int rank) {
  const int shift = static_cast<int>(id % static_cast<uint32_t>(size));
  return part_of(count, granule, size, (rank + shift) % size);
}

}  // namespace qsgd
