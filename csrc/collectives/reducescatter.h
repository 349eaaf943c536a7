// A reduction of which every rank keeps its part.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/reduce.h"

namespace qsgd {

// `in` holds counts[r] elements for each rank r, one part behind the other; `out` receives this
// rank's part, summed over the ranks in the order of TreeSum. `counts` is equal on all ranks. `out`
// may lie in `in` only as the place of this rank's own part. Returns whether the results are
// finite.
bool reducescatter(Transport& transport, const void* in, void* out,
                   const std::vector<size_t>& counts, const ReduceArgs& args);

}  // namespace qsgd
