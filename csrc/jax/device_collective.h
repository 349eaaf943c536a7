// The same for programs on a GPU, with buffers in device memory.
#pragma once

#include "jax/xla_ffi.h"

namespace qsgd::xla {

// The handler of every collective, for XLA:GPU, on its host thread. It records an event in the
// program's stream and blocks until the engine's work is done: later work of the program needs no
// further synchronisation, and errors are returned to the program. XLA calls the handlers of one
// program in one order, which must be equal on all ranks.
Failure* device_collective(CallFrame* frame);

// For programs without a stream, whose memory the kernels' CPU emulation treats as device memory.
Failure* twin_collective(CallFrame* frame);

}  // namespace qsgd::xla
