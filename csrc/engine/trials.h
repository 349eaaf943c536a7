// What the engine knows of the machine that it plans for, and what it has cost to measure.
#pragma once

#include <functional>
#include <mutex>
#include <optional>

#include "collectives/allreduce.h"
#include "planner/cost_model.h"

namespace qsgd {

// Any thread may ask; the thread that drives the engine runs trials.
class Trials {
 public:
  explicit Trials(const Communicator& communicator) : communicator_(communicator) {}

  // Measures by exchanges whose bytes are none of the program's.
  Machine run(const std::function<Machine()>& measure);
  void know(Machine machine);
  std::optional<Machine> machine() const;
  // What this rank has given others for the program.
  BytesGiven traffic() const;

 private:
  const Communicator communicator_;
  mutable std::mutex mutex_;  // guards what follows
  std::optional<Machine> machine_;
  std::optional<BytesGiven> before_;  // while trials run
  BytesGiven over_;                   // of those that are over
};

}  // namespace qsgd
