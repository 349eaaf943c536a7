// Exact allreduce of small messages: everyone gets everything and sums it in the order of TreeSum.
#pragma once

#include "collectives/stream.h"
#include "transport/transport.h"

namespace qsgd {

// log2(p) steps, (p-1) times the message sent per rank (Bruck et al., Efficient algorithms for
// all-to-all communications in multiport message-passing systems, 1997).
void gather_allreduce(Transport& transport, Stream& stream);

}  // namespace qsgd
