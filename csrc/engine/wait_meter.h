// Time during which the program waits for its operations, with any number of threads.
#pragma once

#include <chrono>
#include <mutex>

#include "common/coarse_clock.h"

namespace qsgd {

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

}  // namespace qsgd
