// One rank's bytes to all, along a binomial tree: log2(p) rounds.
#pragma once

#include "transport/transport.h"

namespace qsgd {

void broadcast(Transport& transport, void* data, size_t size_bytes, int root);

}  // namespace qsgd
