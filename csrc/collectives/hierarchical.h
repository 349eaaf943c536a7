// Allreduce on nodes with several ranks: shared memory within a node, messages only between nodes.
#pragma once

#include "collectives/algorithm.h"
#include "collectives/schedule.h"

namespace qsgd {

// Number of ranks of each node, the first ones, that communicate with other nodes: all, but one if
// the algorithm uses leaders, or if nodes have different sizes.
int owners_of(const SharedNode& node, const AlgorithmTraits& algorithm);

// The elements of tensor `id` whose sums this rank codes; owner_residual belongs to them.
Range hierarchical_owned(const SharedNode& node, int owners, size_t count, size_t granule,
                         uint32_t id);

// The elements that this rank codes for other nodes; the used part of `residual` belongs to them.
Range hierarchical_shard(const SharedNode& node, int owners, size_t count, size_t granule,
                         uint32_t id);

}  // namespace qsgd
