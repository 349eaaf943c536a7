// Exact allreduce of small messages: every rank gathers all and sums them in the order of TreeSum.
#pragma once

#include "collectives/stream.h"
#include "transport/transport.h"

namespace qsgd {

// log2(p) steps; each rank sends (p-1) times the message (Bruck et al., Efficient algorithms for
// all-to-all communications in multiport message-passing systems, 1997).
void gather_allreduce(Transport& transport, Stream& stream);

}  // namespace qsgd
