// Exact allreduce by direct exchange: every rank sends each owner its addends, owners sum in rank
// order and send the sums to all. 2 (p-1)/p of the bytes per rank, two steps of latency.
#pragma once

#include <vector>

#include "collectives/reduce.h"
#include "transport/transport.h"

namespace qsgd {

// Reduces the tensors together, each element in rank order, so its bits depend neither on its owner
// nor on what it is fused with. Small messages go whole to everyone instead, which takes log2(p)
// steps and gives the same bits.
void direct_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                      const ReduceArgs& args);

}  // namespace qsgd
