// Reduce-scatter: every rank keeps its part of a reduction.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/reduce.h"

namespace qsgd {

// `in` has counts[r] elements for each rank r, in rank order; `out` receives this rank's part,
// summed over the ranks in the order of TreeSum. `counts` is equal on all ranks. `out` may overlap
// `in` only if it is this rank's part of it. Returns whether the results are finite.
bool reducescatter(Transport& transport, const void* in, void* out,
                   const std::vector<size_t>& counts, const ReduceArgs& args);

}  // namespace qsgd
