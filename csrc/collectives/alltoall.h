// A part of every rank's bytes to each rank.
#pragma once

#include <cstddef>
#include <vector>

#include "transport/transport.h"

namespace qsgd {

// `in` holds send_sizes[r] bytes for each rank r, one behind the other, and `out` receive_sizes[r]
// of each; what rank a sends b is what b expects of a. The buffers must not overlap.
void alltoallv(Transport& transport, const void* in, const std::vector<size_t>& send_sizes,
               void* out, const std::vector<size_t>& receive_sizes);

}  // namespace qsgd
