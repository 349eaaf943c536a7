// When each training step began, and the engine's work during it.
//
// The engine is not told of steps. A step begins when an allreduced tensor is submitted more often
// than any tensor so far, and lasts until the next begins: a metric that is reduced once per epoch
// begins none.
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

// Totals of a rank's engine, since its start or within a step.
struct StepWork {
  double wait_s = 0;  // during which the program waited
  double comm_s = 0;
  double coding_s = 0;
  uint64_t wire_bytes = 0;
};

// A completed step.
struct Step {
  double seconds;
  StepWork work;
};

// A tensor of a step.
struct StepLayer {
  std::string name;
  size_t elements;
  double ready_s;  // since the step's first submission
};

struct StepProfile {
  uint64_t steps = 0;             // begun
  std::vector<Step> last;         // the latest completed steps
  std::vector<StepLayer> layers;  // of the latest completed step, in the order of submission
  bool waits_seen = true;         // no framework waited for any of them by other means than handles
};

class StepClock {
 public:
  using Clock = std::chrono::steady_clock;
  // Called for each completed step: its number, beginning with 1, and when it began and ended.
  using Observer = std::function<void(uint64_t, Clock::time_point, Clock::time_point)>;

  // Keeps the figures of the last `kept` steps. `read_work` is called when a step begins. The
  // submitting thread calls both functions.
  StepClock(size_t kept, std::function<StepWork()> read_work, Observer over = {});

  // Called by any thread that starts an allreduce of a lasting name. `foreign`: a framework waits
  // for it by other means than its handle.
  void started(const Operation& operation, bool foreign);
  uint64_t steps() const;
  StepProfile profile() const;

 private:
  struct Edge {
    Clock::time_point at;
    StepWork work;  // so far
  };
  struct Known {
    uint64_t count = 0;
    uint64_t step = 0;  // of its last submission; the first is 1
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
  std::vector<Edge> edges_;  // ring buffer: the beginning of step s is at (s - 1) % most_edges_
  std::map<int32_t, std::unordered_map<std::string, Known>> known_;  // by process set and name
  size_t names_ = 0;
  std::vector<Arrival> arrivals_;  // of the current step
  std::vector<Arrival> before_;    // of the step before
};

}  // namespace qsgd
