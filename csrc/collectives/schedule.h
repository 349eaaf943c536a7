// Ownership of elements: pure functions, equal on every rank.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsgd {

// Of a message of a pipeline of exact elements: large compared with the cost of a message, small
// enough to be summed in cache.
constexpr size_t kSegmentBytes = size_t{256} << 10;

struct Range {
  size_t begin = 0;
  size_t end = 0;
  size_t size() const { return end - begin; }
};

// Part `part` of `parts` nearly equal parts of `count` elements, cut at multiples of `granule`.
inline Range part_of(size_t count, size_t granule, int parts, int part) {
  const size_t units = (count + granule - 1) / granule;
  const auto cut = [&](int i) {
    // Quotient and remainder are multiplied separately, so that units * i cannot overflow.
    const auto n = static_cast<size_t>(parts), k = static_cast<size_t>(i);
    const size_t unit = units / n * k + units % n * k / n;
    return unit * granule < count ? unit * granule : count;
  };
  return {cut(part), cut(part + 1)};
}

// The elements of tensor `id` that `rank` sums. Each tensor is partitioned separately, so that the
// result of a step does not depend on which tensors were fused. The partition is rotated by the id,
// so that small tensors are not all owned by the same rank.
inline Range owned(size_t count, size_t granule, uint32_t id, int size, int rank) {
  const int shift = static_cast<int>(id % static_cast<uint32_t>(size));
  return part_of(count, granule, size, (rank + shift) % size);
}

}  // namespace qsgd
