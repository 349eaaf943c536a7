// Compressed allreduce with the smallest error: every rank sends its codes to all others, and all
// decode and sum the same codes in rank order. Each element is coded once, but each rank sends p -
// 1 times the compressed size, so it only pays on few ranks.
#pragma once

#include <vector>

#include "collectives/segments.h"
#include "common/workers.h"

namespace qsgd {

// Sums (or averages) floating tensors; the result has the same bytes on all ranks.
//
// With w the normalised variance of the quantiser, the mean over p ranks of independent gradients
// has a normalised error of w. A rank adds its own decoded codes, not its input, because the other
// ranks have only these. Owner residuals are not used, because there are no owners.
void allgather_compressed(Transport& transport, std::vector<ReduceTensor>& tensors,
                          const ReduceArgs& args, uint64_t seed, Workers* workers = nullptr,
                          Pipelining* pipelining = nullptr);

}  // namespace qsgd
