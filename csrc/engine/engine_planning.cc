// How the engine comes to know the machine that it plans for.
#include <utility>

#include "engine/engine.h"
#include "planner/measure.h"

namespace qsgd {

// On all ranks together.
void Engine::learn_machine() {
  Machine machine;
  if (config_.machine) {
    machine = *config_.machine;
  } else {
    std::vector<CodecSpec> codecs;
    for (const int bits : {8, 4, 2}) {
      codecs.emplace_back();
      codecs.back().bits = bits;
    }
    {
      const std::lock_guard<std::mutex> lock(trials_mutex_);
      before_trials_ = bytes_given(communicator_);
    }
    machine = measure(communicator_, ranks_per_node(node_.get()), codecs);
    if (rank() == 0 && config_.measured) config_.measured(machine);
  }
  PlanRequest request;
  (is_compressed(config_.algorithm) ? request.coded : request.exact) = config_.algorithm;
  coordinator_.know_machine(machine, request, workers_.get());
  {
    const std::lock_guard<std::mutex> lock(trials_mutex_);
    machine_ = std::move(machine);
    if (before_trials_) {
      const BytesGiven now = bytes_given(communicator_);
      in_trials_.in_messages += now.in_messages - before_trials_->in_messages;
      in_trials_.in_memory += now.in_memory - before_trials_->in_memory;
      before_trials_.reset();
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
  }  // not between a sleeper's look and its sleep
  changed_.notify_all();
}

// What this rank has given others for the program: trials are not among it.
BytesGiven Engine::traffic() const {
  const std::lock_guard<std::mutex> lock(trials_mutex_);
  const BytesGiven given = before_trials_ ? *before_trials_ : bytes_given(communicator_);
  return {given.in_messages - in_trials_.in_messages, given.in_memory - in_trials_.in_memory};
}

std::optional<Machine> Engine::known_machine() const {
  const std::lock_guard<std::mutex> lock(trials_mutex_);
  return machine_;
}

std::optional<Machine> Engine::machine() {
  const bool at_start = config_.machine || config_.measure_at_start;
  if (!at_start || size() == 1) return known_machine();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return known_machine() || ended_; });
  if (!known_machine()) {
    throw internal_error("the machine was not measured: " + abort_->message());
  }
  return known_machine();
}

}  // namespace qsgd
