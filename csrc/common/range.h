// Consecutive elements, and their division into parts.
#pragma once

#include <cstddef>

namespace qsgd {

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

}  // namespace qsgd
