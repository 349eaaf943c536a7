// One operation under way: what a caller waits on.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "common/error.h"
#include "transport/transport.h"

namespace qsgd {

class Handle {
 public:
  explicit Handle(std::shared_ptr<AbortFlag> abort) : abort_(std::move(abort)) {}

  bool done() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }

  // True when it ended with the job: MPI may still write to its memory, for ever.
  bool lost() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return kind_ == ErrorKind::kRankFailed;
  }

  // True once done; false after `timeout`.
  bool wait_for(std::chrono::milliseconds timeout) const {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, timeout, [this] { return done_; });
  }

  // Throws what the operation ended with, if it failed.
  void check() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kind_ == ErrorKind::kNone) return;
    if (kind_ == ErrorKind::kRankFailed) abort_->set_noticed();
    throw Error(kind_, message_);
  }

  void finish(ErrorKind kind = ErrorKind::kNone, const std::string& message = {}) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (done_) return;
      kind_ = kind;
      message_ = message;
      done_ = true;
    }
    changed_.notify_all();
  }

 private:
  const std::shared_ptr<AbortFlag> abort_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  ErrorKind kind_ = ErrorKind::kNone;
  std::string message_;
};

}  // namespace qsgd
