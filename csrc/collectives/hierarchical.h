// Allreduce over nodes of several ranks: shared memory within a node, messages only across.
#pragma once

#include <vector>

#include "collectives/algorithm.h"
#include "collectives/schedule.h"

namespace qsgd {

// Sums within every node in the order of TreeSum, each rank a shard; reduces each shard across the
// nodes, in the order of their first ranks; shares the shards within the node. Nodes of unequal
// size leave the second step to their first ranks. Where it compresses, messages across nodes are
// compressed by SRA and shards are cut at whole buckets. communicator.node must not be null.
void hierarchical_allreduce(Communicator& communicator, std::vector<ReduceTensor>& tensors,
                            const ReduceArgs& args, bool compressed, uint64_t seed);

// The elements of tensor `id` whose sums this rank codes, to which owner_residual belongs; empty
// where a node leaves coding to its first rank.
Range hierarchical_owned(const SharedNode& node, size_t count, size_t granule, uint32_t id);

// The elements that this rank codes for other nodes, to which the used part of residual belongs.
Range hierarchical_shard(const SharedNode& node, size_t count, size_t granule, uint32_t id);

}  // namespace qsgd
