// Streams, events and memory of a device, as declared in codec.h.
#pragma once

#include "gpu/codec.h"
#include "gpu/runtime.h"

namespace qsgd::gpu::order {

inline QSGD_GPU_API(Stream_t) to_stream(Stream stream) {
  return static_cast<QSGD_GPU_API(Stream_t)>(stream);
}
inline QSGD_GPU_API(Event_t) to_event(Event event) {
  return static_cast<QSGD_GPU_API(Event_t)>(event);
}

inline const char* use(int device, int* before) {
  if (const char* why = failure(QSGD_GPU_API(GetDevice)(before))) return why;
  return device == *before ? nullptr : failure(QSGD_GPU_API(SetDevice)(device));
}

inline const char* identify(int device, char* identity) {
  return failure(QSGD_GPU_API(DeviceGetPCIBusId)(identity, kIdentity, device));
}

inline const char* make_stream(Stream* stream) {
  int least = 0, greatest = 0;
  if (const char* why = failure(QSGD_GPU_API(DeviceGetStreamPriorityRange)(&least, &greatest))) {
    return why;
  }
  QSGD_GPU_API(Stream_t) made = nullptr;
  const char* why = failure(
      QSGD_GPU_API(StreamCreateWithPriority)(&made, QSGD_GPU_API(StreamNonBlocking), greatest));
  *stream = made;
  return why;
}

inline const char* end_stream(Stream stream) {
  return failure(QSGD_GPU_API(StreamDestroy)(to_stream(stream)));
}

inline const char* make_event(Event* event) {
  QSGD_GPU_API(Event_t) made = nullptr;
  const char* why =
      failure(QSGD_GPU_API(EventCreateWithFlags)(&made, QSGD_GPU_API(EventDisableTiming)));
  *event = made;
  return why;
}

inline const char* end_event(Event event) {
  return failure(QSGD_GPU_API(EventDestroy)(to_event(event)));
}

// A captured event would never pass; the engine would fail, and end the job.
inline const char* record(Event event, Stream stream) {
  auto status = QSGD_GPU_API(StreamCaptureStatusNone);
  const char* why = failure(QSGD_GPU_API(StreamIsCapturing)(to_stream(stream), &status));
  if (why != nullptr) return why;
  if (status != QSGD_GPU_API(StreamCaptureStatusNone)) {
    return "the stream's work is being captured in a graph, which cannot contain this operation; "
           "start it outside the capture";
  }
  return failure(QSGD_GPU_API(EventRecord)(to_event(event), to_stream(stream)));
}

inline const char* wait(Stream stream, Event event) {
  return failure(QSGD_GPU_API(StreamWaitEvent)(to_stream(stream), to_event(event), 0));
}

// While another thread captures a graph in the global mode, as torch.cuda.graph() does, this thread
// may not query events or allocate pinned memory, unless it is in the relaxed mode.
class Relaxed {
 public:
  Relaxed() { exchange(); }
  ~Relaxed() { exchange(); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  void exchange() { static_cast<void>(QSGD_GPU_API(ThreadExchangeStreamCaptureMode)(&mode_)); }
  QSGD_GPU_API(StreamCaptureMode) mode_ = QSGD_GPU_API(StreamCaptureModeRelaxed);
};

inline const char* passed(Event event, bool* passed) {
  const Relaxed mode;
  const QSGD_GPU_API(Error_t) state = QSGD_GPU_API(EventQuery)(to_event(event));
  const char* why = failure(state);  // clears "not ready" as well
  *passed = state == QSGD_GPU_API(Success);
  return state == QSGD_GPU_API(ErrorNotReady) ? nullptr : why;
}

inline const char* copy(void* to, const void* from, size_t size_bytes, Stream stream) {
  return failure(QSGD_GPU_API(MemcpyAsync)(to, from, size_bytes, QSGD_GPU_API(MemcpyDefault),
                                           to_stream(stream)));
}

inline const char* clear(void* to, size_t size_bytes, Stream stream) {
  return failure(QSGD_GPU_API(MemsetAsync)(to, 0, size_bytes, to_stream(stream)));
}

// With unified addressing, the host address is valid on every device.
inline const char* take_pinned(size_t size_bytes, void** memory) {
  const Relaxed mode;
#if defined(__HIP__)
  // Coherent memory: when an event has passed, the device's writes before it are visible.
  constexpr unsigned kFlags = hipHostMallocPortable | hipHostMallocMapped | hipHostMallocCoherent;
  return failure(hipHostMalloc(memory, size_bytes, kFlags));
#else
  constexpr unsigned kFlags = QSGD_GPU_API(HostAllocPortable) | QSGD_GPU_API(HostAllocMapped);
  return failure(QSGD_GPU_API(HostAlloc)(memory, size_bytes, kFlags));
#endif
}

inline const char* give_pinned(void* memory) {
  const Relaxed mode;
#if defined(__HIP__)
  return failure(hipHostFree(memory));
#else
  return failure(QSGD_GPU_API(FreeHost)(memory));
#endif
}

inline const char* take(size_t size_bytes, void** memory, Stream stream) {
  return failure(QSGD_GPU_API(MallocAsync)(memory, size_bytes, to_stream(stream)));
}

inline const char* give(void* memory, Stream stream) {
  return failure(QSGD_GPU_API(FreeAsync)(memory, to_stream(stream)));
}

}  // namespace qsgd::gpu::order
