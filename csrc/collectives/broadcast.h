// One rank's bytes to all: along a binomial tree in log2(p) rounds, or, when they are many, in
// segments along a chain, which takes little more than one trip.
#pragma once

#include "transport/transport.h"

namespace qsgd {

void broadcast(Transport& transport, void* data, size_t size_bytes, int root);

}  // namespace qsgd
