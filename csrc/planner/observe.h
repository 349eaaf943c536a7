// Trial runs of every allreduce that a plan may choose.
#pragma once

#include <vector>

#include "planner/cost_model.h"

namespace qsgd {

// Adds to machine.observed what allreduces of 4 KB to 16 MB take by every algorithm that suits the
// ranks: exact ones, and compressed ones in each of the codecs. What would take long is left out,
// and so is what is far from the fastest of its kind: it will not be chosen. Collective; every rank
// returns the same.
void observe(Communicator& communicator, Machine& machine, const std::vector<CodecSpec>& codecs);

// Replaces each value by its maximum over the ranks: the slowest rank sets the pace. Collective.
void agree_on_maxima(Transport& transport, const std::vector<double*>& values);

}  // namespace qsgd
