// Alltoall of bytes.
#pragma once

#include <cstddef>
#include <vector>

#include "transport/transport.h"

namespace qsgd {

// `in` holds send_sizes[r] bytes for each rank r, in rank order, and `out` receives
// receive_sizes[r] of each; the size that a sends to b must equal what b expects from a. The
// buffers must not overlap.
void alltoallv(Transport& transport, const void* in, const std::vector<size_t>& send_sizes,
               void* out, const std::vector<size_t>& receive_sizes);

}  // namespace qsgd
