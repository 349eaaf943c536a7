// A ring in which every hop decodes, adds and codes again. For comparison only: its error grows
// with the number of ranks, unlike that of SRA.
#pragma once

#include <vector>

#include "collectives/segments.h"
#include "common/workers.h"

namespace qsgd {

// Sums (or averages) floating tensors; the result has the same bytes on all ranks.
//
// With w the normalised variance of the quantiser, the mean over p ranks of independent gradients
// has a normalised error of about w (p + 1) / 2, growing like (1 + w)^p. Each rank sends
// 2 (p-1)/p of the compressed size, to the next rank only.
void requantizing_ring(Transport& transport, std::vector<ReduceTensor>& tensors,
                       const ReduceArgs& args, uint64_t seed, Workers* workers = nullptr,
                       Pipelining* pipelining = nullptr);

}  // namespace qsgd
