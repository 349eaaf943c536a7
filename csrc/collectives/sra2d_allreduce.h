// SRA on a grid of ranks, as square as possible, for many ranks: each rank exchanges messages with
// its row and its column instead of all others, with one more quantisation.
#pragma once

#include <vector>

#include "collectives/segments.h"
#include "common/workers.h"

namespace qsgd {

// Rank = row * columns + column.
struct Grid {
  int rows;
  int columns;
};

// rows <= columns; {1, size} if size is prime.
Grid squarest_grid(int size);

// Sums (or averages) floating tensors; the result has the same bytes on all ranks.
//
// Ranks of a row send each other codes of the elements that the other's column owns, and sum them;
// ranks of a column do SRA on the sums; its codes are then forwarded along the rows unchanged. With
// w the normalised variance of the quantiser, the mean of independent gradients has a normalised
// error of about 3 w. Each rank sends 2 (p-1)/p of the compressed size, in 3 (rows + columns)
// messages per segment instead of 2 p. With a prime number of ranks there is no grid: SRA is used,
// with 2 w.
void sra2d_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                     const ReduceArgs& args, uint64_t seed, Workers* workers = nullptr,
                     Pipelining* pipelining = nullptr);

}  // namespace qsgd
