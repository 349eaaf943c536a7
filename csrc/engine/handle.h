// One operation under way: what a caller waits on.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/memory.h"
#include "engine/timeline.h"
#include "engine/wait_meter.h"
#include "transport/transport.h"

namespace qsgd {

// What an operation hands back beside the memory that its caller gave.
struct Result {
  Memory output;  // of operations whose result's size depends on all ranks
  std::vector<int64_t> shape;
  std::vector<int64_t> sizes;  // rows from each rank
  int64_t value = 0;
};

class Handle {
 public:
  // `keep` owns what the operation reads and writes. It is let go with the handle, or never if the
  // operation ended with the job.
  explicit Handle(std::shared_ptr<AbortFlag> abort, std::shared_ptr<void> keep = nullptr,
                  std::shared_ptr<Timeline> timeline = nullptr,
                  std::shared_ptr<WaitMeter> waits = nullptr);
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  bool done() const;
  // True when it ended with the job: MPI may still write to its memory, for ever.
  bool lost() const;
  // True once done; false after `timeout`.
  bool wait_for(std::chrono::milliseconds timeout) const;
  // Whether a thread of the program has waited so long, and still does; see Waiting.
  bool waited_for(double seconds) const;
  // Throws what the operation ended with, if it failed.
  void check() const;
  // Once done, lets `keep` go now.
  void let_go();
  // What it handed back. Throws a usage error while it is under way, and what it ended with.
  std::shared_ptr<const Result> result() const;
  // Calls back once it is done, from the engine's thread or at once. Callbacks must not throw, nor
  // wait for other operations.
  void when_done(std::function<void()> callback);

  // By the engine, once; further calls change nothing.
  void finish(Result result);
  void fail(ErrorKind kind, const std::string& message);

 private:
  friend class Waiting;
  void begin_wait(Timeline::Clock::time_point now);
  void end_wait(Timeline::Clock::time_point since);
  void end(ErrorKind kind, const std::string& message, Result result);

  const std::shared_ptr<AbortFlag> abort_;
  const std::shared_ptr<Timeline> timeline_;
  const std::shared_ptr<WaitMeter> waits_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::shared_ptr<void> keep_;
  std::atomic<bool> done_{false};  // once set, what an operation ended with stays
  int waiting_ = 0;                // threads
  std::chrono::steady_clock::time_point waiting_since_;
  ErrorKind kind_ = ErrorKind::kNone;
  std::string message_;
  std::shared_ptr<const Result> result_;
  std::vector<std::function<void()>> callbacks_;
};

// Lives while a thread of the program can do nothing but wait for the handle: that time is counted,
// and shown in the timeline.
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
