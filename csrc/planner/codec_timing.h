// Timing of a codec on one rank, with all of its threads.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "common/workers.h"
#include "planner/cost_model.h"

namespace qsgd {

// Medians of measured times.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <class Run>
double seconds_of(const Run& run) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  run();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Median of `repeats` runs after one run for warm-up.
template <class Run>
double median_s(int repeats, const Run& run) {
  std::vector<double> seconds;
  run();
  for (int i = 0; i < repeats; ++i) seconds.push_back(seconds_of(run));
  return median(std::move(seconds));
}

// Codes 4 MiB: more than fits in the L2 cache, as for gradients. Takes some milliseconds.
CodecCost time_codec(const CodecSpec& spec, Workers* workers);

// Time of adding float32 to float32.
double time_adding_s_per_byte();

}  // namespace qsgd
