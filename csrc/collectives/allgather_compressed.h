// The compressed allreduce with the smallest error: every rank sends its codes to all others, and
// all decode and sum the same codes in rank order. Each element is coded once, but each rank sends
// p - 1 times the compressed size, so it pays on few ranks only.
#pragma once

#include <vector>

#include "collectives/segments.h"
#include "common/workers.h"

namespace qsgd {

// Sums (or averages) floating tensors; every rank ends with the same bytes.
//
// With w the normalised variance of the quantiser, the mean over p ranks of independent gradients
// has a normalised error of w. A rank adds its own codes, not its input, since the others know no
// more; owner residuals stay as they are, nobody being an owner.
void allgather_compressed(Transport& transport, std::vector<ReduceTensor>& tensors,
                          const ReduceArgs& args, uint64_t seed, Workers* workers = nullptr,
                          Pipelining* pipelining = nullptr);

}  // namespace qsgd
