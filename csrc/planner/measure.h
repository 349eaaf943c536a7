// Measurement of the cost model's constants on the ranks of this job.
#pragma once

#include <vector>

#include "planner/cost_model.h"

namespace qsgd {

// Exchanges messages between neighbours, on all ranks concurrently, times each of the codecs, and
// tries the allreduces that a plan may choose. Takes one to two seconds. Collective; every rank
// returns the same values: the maxima over the ranks, because the slowest rank limits the others.
//
// ranks_per_node: consecutive ranks that share a node, a divisor of the number of ranks.
// untried: codecs that are timed, too, but not tried in allreduces.
Machine measure(Communicator& communicator, int ranks_per_node,
                const std::vector<CodecSpec>& codecs, const std::vector<CodecSpec>& untried);

}  // namespace qsgd
