// Exact allreduce by recursive halving, then doubling: the bytes of a ring in 2 log2(p) steps
// (Rabenseifner, Optimization of collective reduction operations, ICCS 2004).
#pragma once

#include <vector>

#include "collectives/reduce.h"

namespace qsgd {

// Reduces the tensors together. Sums pair ranks that differ in one bit, highest bit first.
void rabenseifner_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                            const ReduceArgs& args);

}  // namespace qsgd
