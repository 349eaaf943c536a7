#include "engine/wait_meter.h"

#include "common/coarse_clock.h"

namespace qsgd {
void WaitMeter::begin(Clock::time_point now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (threads_++ == 0) since_ = now;
}

void WaitMeter::end(Clock::time_point now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--threads_ == 0) total_s_ += Seconds(now - since_).count();
}

double WaitMeter::total_s() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return threads_ == 0 ? total_s_ : total_s_ + Seconds(Clock::now() - since_).count();
}

}  // namespace qsgd
