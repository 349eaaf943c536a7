// The sparse code of a bucket's signed levels, most of which are 0. For each nonzero level:
// omega(distance from the previous one), its sign, and omega(level). A distance to the position
// after the bucket ends it. Alistarh et al., QSGD, NeurIPS 2017, section 3.2 and Theorem 3.2.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/omega.h"

namespace qsgd {

// level(i) is the level of element i.
template <class Level>
void put_sparse(BitWriter& out, size_t count, const Level& level) {
  size_t next = 0;  // the first element that is not coded
  for (size_t i = 0; i < count; ++i) {
    const int32_t value = level(i);
    if (value == 0) continue;
    out.put_omega(static_cast<uint32_t>(i + 1 - next));
    out.put(value < 0, 1);
    out.put_omega(static_cast<uint32_t>(value < 0 ? -value : value));
    next = i + 1;
  }
  if (next < count) out.put_omega(static_cast<uint32_t>(count + 1 - next));
}

// Calls set(i, level, negative) for the elements with nonzero levels. Throws for codes that
// put_sparse() does not write.
template <class Set>
void get_sparse(BitReader& in, size_t count, const Set& set) {
  for (size_t next = 0; next < count;) {
    const size_t gap = in.get_omega();
    if (gap > count - next + 1) throw internal_error("an element lies outside its bucket");
    if (gap == count - next + 1) return;
    next += gap;
    const bool negative = in.get(1) != 0;
    set(next - 1, in.get_omega(), negative);
  }
}

}  // namespace qsgd
