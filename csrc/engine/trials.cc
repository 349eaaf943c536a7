#include "engine/trials.h"

#include <utility>

namespace qsgd {

Machine Trials::run(const std::function<Machine()>& measure) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    before_ = bytes_given(communicator_);
  }
  Machine machine = measure();
  const std::lock_guard<std::mutex> lock(mutex_);
  const BytesGiven now = bytes_given(communicator_);
  over_.in_messages += now.in_messages - before_->in_messages;
  over_.in_memory += now.in_memory - before_->in_memory;
  before_.reset();
  return machine;
}

void Trials::know(Machine machine) {
  const std::lock_guard<std::mutex> lock(mutex_);
  machine_ = std::move(machine);
}

std::optional<Machine> Trials::machine() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return machine_;
}

BytesGiven Trials::traffic() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const BytesGiven given = before_ ? *before_ : bytes_given(communicator_);
  return {given.in_messages - over_.in_messages, given.in_memory - over_.in_memory};
}

}  // namespace qsgd
