// Trial runs of the allreduces that a plan may choose.
#pragma once

#include <vector>

#include "planner/cost_model.h"

namespace qsgd {

// Adds to machine.observed the times of allreduces of 4 KB to 16 MB by every algorithm that suits
// the ranks: exact ones, and compressed ones with each of the codecs. Skips trials that would take
// long, or that are far from the fastest of their kind and so would not be chosen. Collective;
// every rank returns the same.
void observe(Communicator& communicator, Machine& machine, const std::vector<CodecSpec>& codecs);

// Replaces each value by its maximum over the ranks, because the slowest rank limits the others.
// Collective.
void agree_on_maxima(Communicator& communicator, const std::vector<double*>& values);

}  // namespace qsgd
