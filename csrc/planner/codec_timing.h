// Timing of a codec on one rank, with all of its threads.
#pragma once

#include "common/workers.h"
#include "planner/cost_model.h"

namespace qsgd {

// Codes 4 MiB: more than fits in the L2 cache, as for gradients. Takes some milliseconds.
CodecCost time_codec(const CodecSpec& spec, Workers* workers);

// Time of adding float32 to float32.
double time_adding_s_per_byte();

}  // namespace qsgd
