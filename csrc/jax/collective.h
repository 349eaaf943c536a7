// The collectives as XLA calls them from compiled programs.
#pragma once

#include "jax/xla_ffi.h"

namespace qsgd::xla {

// The handler of every collective, for XLA:CPU; program.h says what it is told. It never waits: the
// call goes on until the engine has done with it, so that a program may have any number under way,
// in any order.
Failure* collective(CallFrame* frame);

}  // namespace qsgd::xla
