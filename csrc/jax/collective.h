// Collectives called by XLA from compiled programs.
#pragma once

#include "jax/xla_ffi.h"

namespace qsgd::xla {

// The handler of every collective, for XLA:CPU; program.h has its arguments. It never blocks: the
// call completes when the engine is done with it, so a program may have any number in flight, in
// any order.
Failure* collective(CallFrame* frame);

}  // namespace qsgd::xla
