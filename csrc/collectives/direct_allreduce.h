// Exact allreduce by direct exchange: every rank sends its addends to each owner; owners sum and
// send the sums to all. 2 (p-1)/p of the bytes per rank, two steps of latency.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/reduce.h"
#include "transport/transport.h"

namespace qsgd {

// The way in which `ranks` ranks reduce `size_bytes` bytes.
enum class DirectWay { kDoubling, kGather, kHalving, kExchange };
DirectWay direct_way(int ranks, size_t size_bytes);

// Reduces the tensors together, each element in the order of TreeSum, so that its bits depend
// neither on its owner nor on fusion. Where messages cost more than their bytes, log2(p) steps are
// used instead: recursive doubling for small ones, or a gather to all ranks if these are few and
// not a power of two; halving for larger ones among many ranks. The bits are the same.
void direct_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                      const ReduceArgs& args);

}  // namespace qsgd
