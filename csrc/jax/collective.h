// Collectives called by XLA from compiled programs.
#pragma once

#include "jax/xla_ffi.h"

namespace qsgd::xla {

// The handler of every collective, for XLA:CPU; program.h has its arguments. It never blocks: the
// call completes when the engine is done with it, so a program may have any number in flight, in
// any order.
Failure* collective(CallFrame* frame);

// The handler of every collective, for XLA:GPU, with buffers in device memory, on its host thread.
// It records an event in the program's stream and blocks until the engine's work is done: later
// work of the program needs no further synchronisation, and errors are returned to the program. XLA
// calls the handlers of one program in one order, which must be equal on all ranks.
Failure* device_collective(CallFrame* frame);

// For programs without a stream, whose memory the kernels' CPU emulation treats as device memory.
Failure* twin_collective(CallFrame* frame);

}  // namespace qsgd::xla
