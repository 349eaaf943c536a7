// Exact allreduce on a ring: 2 (p-1)/p of the bytes per rank, the minimum of any algorithm
// (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009).
#pragma once

#include <vector>

#include "collectives/reduce.h"

namespace qsgd {

// Reduces the tensors together; every rank passes the same list. Each element of a tensor is summed
// in rank order beginning after its owner, independent of fusion.
void ring_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                    const ReduceArgs& args);

}  // namespace qsgd
