// The same for programs of a GPU, whose buffers are in the device's memory.
#pragma once

#include "jax/xla_ffi.h"

namespace qsgd::xla {

// The handler of every collective, for XLA:GPU, on its host thread. It records an event in the
// program's stream and returns when the engine's work is done: what the program queues from then on
// needs no further wait, and an error is the program's. XLA calls the handlers of one program in
// one order, which must be that of the other ranks.
Failure* device_collective(CallFrame* frame);

// For programs without a stream, whose memory the kernels' twin takes for a device's.
Failure* twin_collective(CallFrame* frame);

}  // namespace qsgd::xla
