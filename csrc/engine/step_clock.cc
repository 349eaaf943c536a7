#include "engine/step_clock.h"

#include "common/coarse_clock.h"

namespace qsgd {
namespace {

// Further names are ignored, because a program that creates new names could fill the memory.
constexpr size_t kMostNames = size_t{1} << 16;

StepWork between(const StepWork& from, const StepWork& to) {
  return {to.wait_s - from.wait_s, to.comm_s - from.comm_s, to.coding_s - from.coding_s,
          to.wire_bytes - from.wire_bytes};
}

}  // namespace

StepClock::StepClock(size_t kept, std::function<StepWork()> read_work, Observer over)
    : most_edges_(kept + 1), read_work_(std::move(read_work)), over_(std::move(over)) {}

void StepClock::started(const Operation& operation, bool foreign) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Clock::time_point now = Clock::now();
  auto* const line = know(operation);
  if (line == nullptr) return;
  Known& known = line->second;
  if (++known.count > steps_) begin_step(now);
  // Tensors of the previous step belong to the model; others are reduced only occasionally.
  if (known.step + 1 == steps_) {
    arrivals_.push_back({&line->first, operation.count(), now, foreign});
  }
  known.step = steps_;
}

std::pair<const std::string, StepClock::Known>* StepClock::know(const Operation& operation) {
  auto& names = known_[operation.set];
  const auto it = names.find(operation.name);
  if (it != names.end()) return &*it;
  if (names_ == kMostNames) return nullptr;
  ++names_;
  return &*names.try_emplace(operation.name).first;
}

void StepClock::begin_step(Clock::time_point now) {
  const Edge edge{now, read_work_()};
  if (over_ && steps_ > 0) over_(steps_, edges_[(steps_ - 1) % most_edges_].at, now);
  const size_t place = steps_++ % most_edges_;
  if (place < edges_.size()) {
    edges_[place] = edge;
  } else {
    edges_.push_back(edge);
  }
  before_.swap(arrivals_);
  arrivals_.clear();
}

uint64_t StepClock::steps() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return steps_;
}

StepProfile StepClock::profile() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  StepProfile profile;
  profile.steps = steps_;
  for (uint64_t i = steps_ - edges_.size(); i + 1 < steps_; ++i) {
    const Edge& begin = edges_[i % most_edges_];
    const Edge& end = edges_[(i + 1) % most_edges_];
    profile.last.push_back({Seconds(end.at - begin.at).count(), between(begin.work, end.work)});
  }
  for (const Arrival& arrival : before_) {
    const double ready_s = Seconds(arrival.at - before_.front().at).count();
    profile.layers.push_back({*arrival.name, arrival.elements, ready_s});
    profile.waits_seen &= !arrival.foreign;
  }
  return profile;
}

}  // namespace qsgd
