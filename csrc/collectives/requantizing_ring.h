// A ring whose every hop decodes, adds and codes anew. It is here to be compared with: the error
// grows with the number of ranks, where that of SRA does not.
#pragma once

#include <vector>

#include "collectives/segments.h"
#include "common/workers.h"

namespace qsgd {

// Sums (or averages) floating tensors; every rank ends with the same bytes.
//
// With w the normalised variance of the quantiser, the mean over p ranks of independent gradients
// has a normalised error of about w (p + 1) / 2, growing like (1 + w)^p. Each rank sends
// 2 (p-1)/p of the compressed size, to the next rank only.
void requantizing_ring(Transport& transport, std::vector<ReduceTensor>& tensors,
                       const ReduceArgs& args, uint64_t seed, Workers* workers = nullptr,
                       Pipelining* pipelining = nullptr);

}  // namespace qsgd
