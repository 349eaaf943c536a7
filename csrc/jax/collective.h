// The collectives as XLA calls them from compiled programs.
#pragma once

#include "jax/xla_ffi.h"

namespace qsgd::xla {

// The handler of every collective, for XLA:CPU. It never waits: the call goes on until the engine
// has done with it, so that a program may have any number under way, in any order.
//
// Its one attribute is in hexadecimal digits what Writer writes of: rank and size of the job that
// the program was traced in (int32); the number of arguments; and of each its operation, as
// Operation.text() returns it, the rows that are to come from each rank, where the shape of the
// result depends on them, and the splits of an alltoall.
Failure* collective(CallFrame* frame);

}  // namespace qsgd::xla
