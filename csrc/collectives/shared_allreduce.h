// Exact allreduce among the ranks of one node through shared memory.
#pragma once

#include <vector>

#include "collectives/reduce.h"
#include "transport/shared_node.h"

namespace qsgd {

// Reduces the tensors together, each element in the order of TreeSum; all ranks of the job must be
// on the node.
void shared_allreduce(SharedNode& node, std::vector<ReduceTensor>& tensors, const ReduceArgs& args);

}  // namespace qsgd
