// Allgather of bytes.
#pragma once

#include <cstddef>
#include <vector>

#include "transport/transport.h"

namespace qsgd {

// `out` receives sizes[0] bytes of rank 0, then sizes[1] of rank 1, and so on; `sizes` is equal on
// all ranks. `in` may be this rank's part of `out`.
void allgatherv(Transport& transport, const void* in, void* out, const std::vector<size_t>& sizes);

}  // namespace qsgd
