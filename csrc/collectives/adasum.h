// Allreduce that adds orthogonal components and averages parallel ones, so that the step of a sum
// of gradients does not grow with the number of ranks whose gradients agree (Maleki et al., Scaling
// Distributed Training with Adaptive Summation, MLSys 2021, sec. 3 and 4).
#pragma once

#include <vector>

#include "collectives/reduce.h"

namespace qsgd {

// Reduces each tensor separately with
//   adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b,
// over a tree of the ranks: surplus ranks beyond a power of two join their partners, then pairs at
// distance 1, 2, 4, ... join. Vectors are halved at each level; products and norms are summed in
// double over the ranks that share a pair of vectors. All ranks get the same bits, independent of
// the other tensors in the list. Throws a usage error as check_adasum() does.
void adasum_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                      const ReduceArgs& args);

// Throws a usage error where Adasum is undefined: for integers and coded gradients.
void check_adasum(DType dtype, bool coded);

}  // namespace qsgd
