// Quantised scatter-reduce-allgather: the compressed allreduce with the smallest error that sends
// each element only twice. Every rank sends each owner its codes of the owner's elements; the owner
// sums in float32 in rank order and quantises again, and all ranks decode the owner's codes.
#pragma once

#include <vector>

#include "collectives/segments.h"
#include "common/workers.h"

namespace qsgd {

// Sums (or averages) floating tensors; the result has the same bytes on all ranks, including the
// owner.
//
// With w the normalised variance of the quantiser, the mean over p ranks of independent gradients
// has a normalised error of w (p-1)/p + w (1 + w (p-1)/p), about 2 w. Each rank sends 2 (p-1)/p of
// the compressed size. The owner's residuals are those of owned() with `size` ranks.
void sra_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                   uint64_t seed, Workers* workers = nullptr, Pipelining* pipelining = nullptr);

}  // namespace qsgd
