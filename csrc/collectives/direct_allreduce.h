// Exact allreduce by direct exchange: every rank sends each owner its addends, owners sum and send
// the sums to all. 2 (p-1)/p of the bytes per rank, two steps of latency.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/reduce.h"
#include "transport/transport.h"

namespace qsgd {

// How so many ranks reduce so many bytes.
enum class DirectWay { kDoubling, kGather, kHalving, kExchange };
DirectWay direct_way(int ranks, size_t size_bytes);

// Reduces the tensors together, each element in the order of TreeSum, so its bits depend neither on
// its owner nor on what it is fused with. Where messages cost more than their bytes do, they take
// log2(p) steps instead: small ones by recursive doubling or, among a few ranks that are no power
// of two, whole to everyone; larger ones among many ranks by halving. The bits are the same.
void direct_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                      const ReduceArgs& args);

}  // namespace qsgd
