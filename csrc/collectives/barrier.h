// Blocks until every rank has called it, in log2(p) steps (Hensgen, Finkel and Manber, Two
// algorithms for barrier synchronization, 1988).
#pragma once

#include "transport/transport.h"

namespace qsgd {

void barrier(Transport& transport);

}  // namespace qsgd
