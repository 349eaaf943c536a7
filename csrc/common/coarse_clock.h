// A clock with a resolution of a few milliseconds, for durations of seconds; reading it takes a
// fifth of the time of the exact clock.
#pragma once

#include <time.h>

#include <chrono>

namespace qsgd {

using Seconds = std::chrono::duration<double>;

struct CoarseClock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<CoarseClock>;
  static constexpr bool is_steady = true;

  static time_point now() noexcept {
#ifdef CLOCK_MONOTONIC_COARSE
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return time_point(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec));
#else
    return time_point(std::chrono::steady_clock::now().time_since_epoch());
#endif
  }
};

}  // namespace qsgd
