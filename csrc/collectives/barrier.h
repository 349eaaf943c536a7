// Waits until every rank has come (Hensgen, Finkel and Manber, Two algorithms for barrier
// synchronization, 1988): log2(p) steps.
#pragma once

#include "transport/transport.h"

namespace qsgd {

void barrier(Transport& transport);

}  // namespace qsgd
