// Prints what a wait does whose every turn keeps the core busy for some microseconds, as asking MPI
// over TCP does: the turns before the first nap, then the naps in ns.
#include <chrono>
#include <cstdio>

#include "transport/transport.h"

using Clock = std::chrono::steady_clock;

int main() {
  constexpr std::chrono::microseconds kTurn{20};
  constexpr int kNaps = 25;
  qsgd::Backoff backoff;
  for (int wait = 0; wait < 3; ++wait, backoff.reset()) {
    int turns = 0, naps = 0;
    while (naps < kNaps) {
      for (const auto until = Clock::now() + kTurn; Clock::now() < until;) continue;
      const std::chrono::nanoseconds nap = backoff.pause_or_nap();
      if (nap.count() == 0) {
        ++turns;
        continue;
      }
      if (naps++ == 0) std::printf("%d", turns);
      std::printf(" %lld", static_cast<long long>(nap.count()));
    }
    std::printf("\n");
  }
}
