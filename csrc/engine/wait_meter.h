// The time in which the program waits for its operations, however many of its threads do.
#pragma once

#include <chrono>
#include <mutex>

namespace qsgd {

class WaitMeter {
 public:
  using Clock = std::chrono::steady_clock;

  // Around the time in which a thread waits.
  void begin(Clock::time_point now);
  void end(Clock::time_point now);
  // In which at least one thread has waited; a wait that goes on counts until now.
  double total_s() const;

 private:
  mutable std::mutex mutex_;
  int threads_ = 0;
  Clock::time_point since_;  // valid while threads_ > 0
  double total_s_ = 0;
};

}  // namespace qsgd
