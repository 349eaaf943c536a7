// What coding costs a rank, with all the threads that it codes with.
#pragma once

#include "common/workers.h"
#include "planner/cost_model.h"

namespace qsgd {

// Codes 4 MiB: more than the second-level cache holds, as gradients do. Takes some milliseconds.
CodecCost time_codec(const CodecSpec& spec, Workers* workers);

// Of adding float32 to float32.
double time_adding_s_per_byte();

}  // namespace qsgd
