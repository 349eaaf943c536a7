// When each training step began, and what of the engine's work fell into it.
//
// The engine is not told of steps. One begins when some allreduced tensor comes more often than any
// has so far, and lasts until the next begins: a metric that is reduced once per epoch begins none.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/operation.h"

namespace qsgd {

// Of a rank's engine, since it began or within a step.
struct StepWork {
  double wait_s = 0;  // in which the program waited
  double comm_s = 0;
  double coding_s = 0;
  uint64_t wire_bytes = 0;
};

// A step that is over.
struct Step {
  double seconds;
  StepWork work;
};

// A tensor as it came in a step.
struct StepLayer {
  std::string name;
  size_t elements;
  double ready_s;  // since the step's first submission
};

struct StepProfile {
  uint64_t steps = 0;             // begun
  std::vector<Step> last;         // the latest that are over
  std::vector<StepLayer> layers;  // of the latest that is over, as they were submitted
  bool waits_seen = true;         // no framework waited for any of them by itself
};

class StepClock {
 public:
  using Clock = std::chrono::steady_clock;
  // Told of each step that is over: its number, the first being 1, and when it began and ended.
  using Observer = std::function<void(uint64_t, Clock::time_point, Clock::time_point)>;

  // Keeps the figures of `kept` steps. `read_work` is asked as each begins. Both functions are
  // called by the thread that submits.
  StepClock(size_t kept, std::function<StepWork()> read_work, Observer over = {});

  // Any thread, as it starts an allreduce whose name comes again. `foreign`: a framework waits for
  // it by itself, and no thread in its handle.
  void started(const Operation& operation, bool foreign);
  uint64_t steps() const;
  StepProfile profile() const;

 private:
  struct Edge {
    Clock::time_point at;
    StepWork work;  // until then
  };
  struct Known {
    uint64_t count = 0;
    uint64_t step = 0;  // in which it came last; the first is 1
  };
  struct Arrival {
    const std::string* name;  // in known_
    size_t elements;
    Clock::time_point at;
    bool foreign;
  };

  std::pair<const std::string, Known>* know(const Operation& operation);
  void begin_step(Clock::time_point now);

  const size_t most_edges_;
  const std::function<StepWork()> read_work_;
  const Observer over_;
  mutable std::mutex mutex_;  // guards what follows
  uint64_t steps_ = 0;
  std::vector<Edge> edges_;  // a ring: that at which step s began is at (s - 1) % most_edges_
  std::map<int32_t, std::unordered_map<std::string, Known>> known_;  // by process set and name
  size_t names_ = 0;
  std::vector<Arrival> arrivals_;  // of the step under way
  std::vector<Arrival> before_;    // of the one before
};

}  // namespace qsgd
