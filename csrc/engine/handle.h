// Handle of an operation, on which callers wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "common/coarse_clock.h"
#include "common/error.h"
#include "engine/timeline.h"
#include "gpu/device.h"
#include "transport/transport.h"

namespace qsgd {

// Time during which the program waits for its operations, with any number of threads.
class WaitMeter {
 public:
  using Clock = std::chrono::steady_clock;

  // Called when a thread begins and ends to wait.
  void begin(Clock::time_point now) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (threads_++ == 0) since_ = now;
  }
  void end(Clock::time_point now) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--threads_ == 0) total_s_ += Seconds(now - since_).count();
  }
  // Time during which at least one thread waited, current waits included.
  double total_s() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return threads_ == 0 ? total_s_ : total_s_ + Seconds(Clock::now() - since_).count();
  }

 private:
  mutable std::mutex mutex_;
  int threads_ = 0;
  Clock::time_point since_;  // valid while threads_ > 0
  double total_s_ = 0;
};

// Memory for results allocated by the core, whose size depends on all ranks: uninitialised bytes
// aligned to 64, as frameworks expect for tensors.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t size_bytes)
      : bytes_(static_cast<char*>(std::aligned_alloc(kAlignment, rounded(size_bytes))), std::free),
        size_(size_bytes) {
    if (bytes_ == nullptr) throw std::bad_alloc();
  }
  // At least as many bytes, allocated elsewhere.
  Memory(const std::shared_ptr<uint8_t>& bytes, size_t size_bytes)
      : bytes_(std::reinterpret_pointer_cast<char>(bytes)), size_(size_bytes) {}
  char* data() const { return bytes_.get(); }
  size_t size() const { return size_; }

 private:
  static constexpr size_t kAlignment = 64;
  static size_t rounded(size_t size) { return (size / kAlignment + 1) * kAlignment; }

  std::shared_ptr<char> bytes_;
  size_t size_ = 0;
};

// Results of an operation, in addition to the memory that the caller passed.
struct Result {
  // If the size of the result depends on all ranks: its memory, on the host or on a device.
  Memory output;
  std::shared_ptr<gpu::Device> device;  // of the tensor; null: it was in host memory
  gpu::DeviceMemory on_device;
  std::vector<int64_t> shape;
  std::vector<int64_t> sizes;  // number of rows from each rank
  int64_t value = 0;

  bool is_on_host() const { return on_device.data() == nullptr; }
  void* data() const { return is_on_host() ? static_cast<void*>(output.data()) : on_device.data(); }
  size_t size_bytes() const { return is_on_host() ? output.size() : on_device.size_bytes(); }
};

class Handle {
 public:
  // `keep` owns the memory of the operation. It is released with the handle, or never if the job
  // ended during the operation.
  Handle(std::shared_ptr<AbortFlag> abort, std::shared_ptr<void> keep,
         std::shared_ptr<Timeline> timeline, std::shared_ptr<WaitMeter> waits);
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  bool done() const;
  // Whether the operation ended with the job: MPI may write to its memory at any later time.
  bool lost() const;
  // Returns true if done, false after `timeout`.
  bool wait_for(std::chrono::milliseconds timeout) const;
  // Whether a thread of the program has been waiting for at least `seconds`; see Waiting.
  bool waited_for(double seconds) const;
  // Throws the operation's error if it failed.
  void check() const;
  // Releases `keep`, if done.
  void release_memory();
  // Returns the results. Throws a usage error while the operation is in flight, and the operation's
  // error.
  std::shared_ptr<const Result> result() const;
  // Calls `callback` when done: from the engine's thread, or immediately if it is done already.
  // Callbacks must neither throw nor wait for other operations.
  void when_done(std::function<void()> callback);

  // Marks that a thread of the program is blocked until the operation is done.
  void mark_waited_for(Timeline::Clock::time_point now);

  // Called by the engine; only the first call has an effect.
  void finish(Result result);
  void fail(Fault fault);

 private:
  friend class Waiting;
  void begin_wait(Timeline::Clock::time_point now);
  void end_wait(Timeline::Clock::time_point since);
  void end(Fault fault, Result result);

  const std::shared_ptr<AbortFlag> abort_;
  const std::shared_ptr<Timeline> timeline_;
  const std::shared_ptr<WaitMeter> waits_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::shared_ptr<void> keep_;
  std::atomic<bool> done_{false};  // once set, the results do not change
  int waiting_ = 0;                // threads
  std::chrono::steady_clock::time_point waiting_since_;
  Fault fault_;
  std::shared_ptr<const Result> result_;
  std::vector<std::function<void()>> callbacks_;
};

// Exists while a thread of the program is blocked by the handle: this time is counted, and shown in
// the timeline.
class Waiting {
 public:
  explicit Waiting(Handle& handle) : handle_(handle) { handle_.begin_wait(since_); }
  ~Waiting() { handle_.end_wait(since_); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Handle& handle_;
  const Timeline::Clock::time_point since_ = Timeline::Clock::now();
};

}  // namespace qsgd
