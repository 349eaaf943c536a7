// The measured machine for the planner, and the bytes sent to measure it.
#pragma once

#include <functional>
#include <mutex>
#include <optional>

#include "collectives/allreduce.h"
#include "planner/cost_model.h"

namespace qsgd {

// Any thread may read; the thread that drives the engine runs trials.
class Trials {
 public:
  explicit Trials(const Communicator& communicator) : communicator_(communicator) {}

  // Measures; the bytes of its exchanges are not counted as the program's.
  Machine run(const std::function<Machine()>& measure);
  void know(Machine machine);
  std::optional<Machine> machine() const;
  // Bytes that this rank has provided to others for the program.
  BytesGiven traffic() const;

 private:
  const Communicator communicator_;
  mutable std::mutex mutex_;  // guards what follows
  std::optional<Machine> machine_;
  std::optional<BytesGiven> before_;  // at the start of the current trials
  BytesGiven over_;                   // of completed trials
};

}  // namespace qsgd
