// The constants of the cost model, measured on the ranks of this job.
#pragma once

#include <vector>

#include "planner/cost_model.h"

namespace qsgd {

// Exchanges messages among neighbours, all ranks at once, codes a buffer with each of the codecs,
// and tries the allreduces that a plan may choose. Takes a second or two. Collective; every rank
// returns the same: the maxima over the ranks, as the slowest rank sets the pace.
//
// ranks_per_node: consecutive ranks that share a node, a divisor of the number of ranks.
Machine measure(Communicator& communicator, int ranks_per_node,
                const std::vector<CodecSpec>& codecs);

}  // namespace qsgd
