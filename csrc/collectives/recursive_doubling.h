// Exact allreduce in log2(p) exchanges of complete messages: few steps, many bytes (Thakur,
// Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, IJHPCA
// 2005, sec. 4.1).
#pragma once

#include <vector>

#include "collectives/reduce.h"

namespace qsgd {

// Reduces the tensors together. Sums pair ranks that differ in one bit, lowest bit first.
void recursive_doubling_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                                  const ReduceArgs& args);

}  // namespace qsgd
