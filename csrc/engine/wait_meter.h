// The time in which the program waits for its operations, however many of its threads do.
#pragma once

#include <chrono>
#include <mutex>

namespace qsgd {

class WaitMeter {
 public:
  // Around the time in which a thread waits.
  void begin();
  void end();
  // In which at least one thread has waited; a wait that goes on counts until now.
  double total_s() const;

 private:
  using Clock = std::chrono::steady_clock;

  mutable std::mutex mutex_;
  int threads_ = 0;
  Clock::time_point since_;  // valid while threads_ > 0
  double total_s_ = 0;
};

}  // namespace qsgd
