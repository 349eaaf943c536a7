// Broadcast of bytes: along a binomial tree in log2(p) rounds; for large sizes in segments along a
// chain, which takes little longer than one transfer.
#pragma once

#include "transport/transport.h"

namespace qsgd {

void broadcast(Transport& transport, void* data, size_t size_bytes, int root);

}  // namespace qsgd
