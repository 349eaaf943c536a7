// Allreduce over nodes of several ranks: shared memory within a node, messages only across.
#pragma once

#include <vector>

#include "collectives/algorithm.h"
#include "collectives/schedule.h"

namespace qsgd {

// Sums within every node in the order of TreeSum, each of its owners a shard; reduces each shard
// across the nodes, in the order of their first ranks; shares the shards within the node. Where the
// algorithm compresses, messages across nodes are compressed, by SRA or, among many nodes, its
// two-dimensional form, and shards are cut at whole buckets. communicator.node must not be null.
void hierarchical_allreduce(Communicator& communicator, std::vector<ReduceTensor>& tensors,
                            const ReduceArgs& args, const AlgorithmTraits& algorithm,
                            uint64_t seed);

// How many ranks of each node, the first ones, communicate with other nodes: all of them, but one
// where the algorithm leaves it to leaders, and where nodes are of unequal size.
int owners_of(const SharedNode& node, const AlgorithmTraits& algorithm);

// The elements of tensor `id` whose sums this rank codes, to which owner_residual belongs.
Range hierarchical_owned(const SharedNode& node, int owners, size_t count, size_t granule,
                         uint32_t id);

// The elements that this rank codes for other nodes, to which the used part of residual belongs.
Range hierarchical_shard(const SharedNode& node, int owners, size_t count, size_t granule,
                         uint32_t id);

}  // namespace qsgd
