// CUDA's streams, events and memory on the CPU. Each stream has a thread that does what is queued,
// in order, each TWIN_DELAY_US late, so that a missing wait shows. The caller does the null
// stream's work at once. Names are those of CUDA without their beginning.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace gpu_twin {

enum Error_t {
  Success,
  ErrorInvalidDevice,
  ErrorMemoryAllocation,
  ErrorNotReady,
  ErrorStreamCaptureUnsupported
};
enum Flags : unsigned { StreamNonBlocking, EventDisableTiming, HostAllocPortable, HostAllocMapped };
enum MemcpyKind { MemcpyDefault };

using Job = std::function<void()>;

// Guards what is queued and what is recorded. Never destroyed: at the process's end, threads of
// streams that nobody has ended still wait.
struct Order {
  std::mutex mutex;
  std::condition_variable changed;
  bool held = false;  // every stream is
};
inline Order& order() {
  static Order& it = *new Order;
  return it;
}

inline std::chrono::microseconds delay() {
  static const char* const us = std::getenv("TWIN_DELAY_US");
  static const std::chrono::microseconds each(us == nullptr ? 100 : std::atol(us));
  return each;
}

class Queue {
 public:
  Queue() : thread_([this] { serve(); }) {}
  ~Queue() {
    change([this] { ending_ = true; });
    thread_.join();
  }

  void add(Job job) {
    change([&] { jobs_.push_back(std::move(job)); });
  }
  std::atomic<bool> captured{false};
  // Starts nothing while held, unless it is to end.
  void hold(bool held) {
    change([&] { held_ = held; });
  }

 private:
  template <class F>
  static void change(const F& f) {
    const std::lock_guard<std::mutex> lock(order().mutex);
    f();
    order().changed.notify_all();
  }

  void serve() {
    std::unique_lock<std::mutex> lock(order().mutex);
    for (;;) {
      order().changed.wait(
          lock, [this] { return ending_ || (!jobs_.empty() && !held_ && !order().held); });
      if (jobs_.empty()) return;
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(delay());
      job();
      lock.lock();
    }
  }

  std::deque<Job> jobs_;
  bool held_ = false;
  bool ending_ = false;
  std::thread thread_;  // the last: it uses the others
};

// One recording of an event. A wait refers to the one that was the last when it was queued.
struct Record {
  bool done = false;
};
struct Marker {
  std::shared_ptr<Record> last;  // null: never recorded, which has passed
  int device;
};

using Stream_t = Queue*;
using Event_t = Marker*;

inline void queue(Stream_t stream, Job job) {
  if (stream == nullptr) return job();
  stream->add(std::move(job));
}

constexpr int kDevices = 2;
inline int& device() {
  thread_local int current = 0;
  return current;
}
inline Error_t GetDevice(int* current) {
  *current = device();
  return Success;
}
inline Error_t SetDevice(int chosen) {
  if (chosen < 0 || chosen >= kDevices) return ErrorInvalidDevice;
  device() = chosen;
  return Success;
}

inline Error_t DeviceGetPCIBusId(char* name, int size, int chosen) {
  if (chosen < 0 || chosen >= kDevices) return ErrorInvalidDevice;
  // No two ranks share one, though they may be threads of one process; or all do.
  static std::atomic<int> asked{0};
  const bool shared = std::getenv("TWIN_SHARED") != nullptr;
  std::snprintf(name, static_cast<size_t>(size), "%d:%d", shared ? 0 : static_cast<int>(getpid()),
                shared ? chosen : ++asked);
  return Success;
}

inline Error_t GetLastError() { return Success; }
inline const char* GetErrorString(Error_t error) {
  constexpr const char* kNames[] = {"no error", "invalid device ordinal", "out of memory",
                                    "device not ready", "operation not permitted while capturing"};
  return kNames[error];
}

inline Error_t DeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return Success;
}
inline Error_t StreamCreateWithPriority(Stream_t* stream, unsigned, int) {
  *stream = new Queue;
  return Success;
}
// After all that is queued.
inline Error_t StreamDestroy(Stream_t stream) {
  delete stream;
  return Success;
}

// Captures are global: they restrict the calls of all threads that are not in the relaxed mode.
enum StreamCaptureMode { StreamCaptureModeGlobal, StreamCaptureModeRelaxed };
inline StreamCaptureMode& capture_mode() {
  thread_local StreamCaptureMode mode = StreamCaptureModeGlobal;
  return mode;
}
inline Error_t ThreadExchangeStreamCaptureMode(StreamCaptureMode* mode) {
  std::swap(*mode, capture_mode());
  return Success;
}
inline std::atomic<int>& captures() {
  static std::atomic<int> running{0};
  return running;
}
inline bool is_restricted() { return captures() > 0 && capture_mode() != StreamCaptureModeRelaxed; }

enum StreamCaptureStatus { StreamCaptureStatusNone, StreamCaptureStatusActive };
inline Error_t StreamIsCapturing(Stream_t stream, StreamCaptureStatus* status) {
  const bool active = stream != nullptr && stream->captured;
  *status = active ? StreamCaptureStatusActive : StreamCaptureStatusNone;
  return Success;
}

inline Error_t EventCreateWithFlags(Event_t* event, unsigned) {
  *event = new Marker{nullptr, device()};
  return Success;
}
inline Error_t EventDestroy(Event_t event) {
  delete event;
  return Success;
}
inline Error_t EventRecord(Event_t event, Stream_t stream) {
  const auto record = std::make_shared<Record>();
  {
    const std::lock_guard<std::mutex> lock(order().mutex);
    event->last = record;
  }
  queue(stream, [record] {
    const std::lock_guard<std::mutex> lock(order().mutex);
    record->done = true;
    order().changed.notify_all();
  });
  return Success;
}
inline Error_t StreamWaitEvent(Stream_t stream, Event_t event, unsigned) {
  std::unique_lock<std::mutex> lock(order().mutex);
  const std::shared_ptr<Record> record = event->last;
  lock.unlock();
  if (record == nullptr) return Success;
  queue(stream, [record] {
    std::unique_lock<std::mutex> until(order().mutex);
    order().changed.wait(until, [&] { return record->done; });
  });
  return Success;
}
// A query initializes the thread's current device, in CUDA.
inline std::atomic<int>& misplaced() {
  static std::atomic<int> queries{0};
  return queries;
}
inline Error_t EventQuery(Event_t event) {
  if (is_restricted()) return ErrorStreamCaptureUnsupported;
  misplaced() += event->device != device();
  const std::lock_guard<std::mutex> lock(order().mutex);
  return event->last == nullptr || event->last->done ? Success : ErrorNotReady;
}

inline Error_t MemcpyAsync(void* to, const void* from, size_t size_bytes, MemcpyKind,
                           Stream_t stream) {
  queue(stream, [=] { std::memmove(to, from, size_bytes); });
  return Success;
}
inline Error_t MemsetAsync(void* to, int value, size_t size_bytes, Stream_t stream) {
  queue(stream, [=] { std::memset(to, value, size_bytes); });
  return Success;
}

// Memory is filled with this until it is written. Its size lies before it.
constexpr int kUnwritten = 0xEE;
constexpr size_t kAlignment = 256;
inline size_t& size_of(void* memory) {
  return *reinterpret_cast<size_t*>(static_cast<char*>(memory) - kAlignment);
}
inline std::atomic<size_t>& allocated() {
  static std::atomic<size_t> bytes{0};
  return bytes;
}
inline Error_t allocate(void** memory, size_t size_bytes) {
  const size_t rounded = (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* const begin = std::aligned_alloc(kAlignment, kAlignment + rounded);
  if (begin == nullptr) return ErrorMemoryAllocation;
  *memory = static_cast<char*>(begin) + kAlignment;
  size_of(*memory) = size_bytes;
  allocated() += size_bytes;
  std::memset(*memory, kUnwritten, size_bytes);
  return Success;
}
inline Error_t HostAlloc(void** memory, size_t size_bytes, unsigned) {
  return is_restricted() ? ErrorStreamCaptureUnsupported : allocate(memory, size_bytes);
}
inline void release(void* memory) {
  if (memory == nullptr) return;
  allocated() -= size_of(memory);
  std::memset(memory, kUnwritten, size_of(memory));  // so that a later read shows
  std::free(static_cast<char*>(memory) - kAlignment);
}
inline Error_t FreeHost(void* memory) {
  if (is_restricted()) return ErrorStreamCaptureUnsupported;
  release(memory);
  return Success;
}
// Filled again in the stream's order, over what another stream writes too early.
inline Error_t MallocAsync(void** memory, size_t size_bytes, Stream_t stream) {
  const Error_t error = allocate(memory, size_bytes);
  if (error != Success || stream == nullptr) return error;
  return MemsetAsync(*memory, kUnwritten, size_bytes, stream);
}
inline Error_t FreeAsync(void* memory, Stream_t stream) {
  queue(stream, [=] { release(memory); });
  return Success;
}

}  // namespace gpu_twin

// For tests: the bytes of pinned memory and of devices that are allocated.
extern "C" __attribute__((used, visibility("default"))) inline size_t qsgd_gpu_twin_allocated() {
  return gpu_twin::allocated();
}
// For tests: the stream's work counts as captured in a graph.
extern "C" __attribute__((used, visibility("default"))) inline void qsgd_gpu_twin_capture(
    void* stream, bool captured) {
  const bool before = static_cast<gpu_twin::Queue*>(stream)->captured.exchange(captured);
  gpu_twin::captures() += captured - before;
}
// For tests: the queries of events of devices other than the thread's current one.
extern "C" __attribute__((used, visibility("default"))) inline int qsgd_gpu_twin_misplaced() {
  return gpu_twin::misplaced();
}
// For tests: a held stream starts nothing; null: all streams.
extern "C" __attribute__((used, visibility("default"))) inline void qsgd_gpu_twin_hold(void* stream,
                                                                                       bool held) {
  using namespace gpu_twin;
  if (stream != nullptr) return static_cast<Queue*>(stream)->hold(held);
  const std::lock_guard<std::mutex> lock(order().mutex);
  order().held = held;
  order().changed.notify_all();
}
