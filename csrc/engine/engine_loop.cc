// Loop of the engine's own thread, and records of its work in the timeline; engine_drive.cc has the
// loop of other threads.
#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "common/thread_name.h"
#include "engine/engine.h"
#include "engine/staging.h"
#include "planner/codes.h"
#include "planner/measure.h"

namespace qsgd {
namespace {

constexpr std::chrono::milliseconds kLongNap{20};
constexpr std::chrono::milliseconds kShortNap{1};  // other ranks may work without this one
// Longest sleep of a rank whose sleeps add up with those of other ranks on the path to rank 0:
// this, or a fiftieth of the wait. Other ranks sleep for a fifth of theirs.
constexpr std::chrono::nanoseconds kRelayNap{400'000};
constexpr int kRelayShare = 50;
constexpr size_t kMostAhead = size_t{1} << 30;  // bytes of host copies that wait for other ranks

// Number of consecutive ranks on each node, for the planner; 1 if nodes differ.
int ranks_per_node(const SharedNode* node) {
  if (node == nullptr) return 1;
  const size_t most = node->nodes().front().size();
  int next = 0;
  for (const std::vector<int>& ranks : node->nodes()) {
    if (ranks.size() != most) return 1;
    for (const int rank : ranks) {
      if (rank != next++) return 1;
    }
  }
  return static_cast<int>(most);
}

// On the wire, with the scales of the buckets.
double bits_per_element(const Response& response, size_t i, DType dtype) {
  if (response.codings.empty()) return 8.0 * static_cast<double>(facts(dtype).size);
  const CodecSpec& coding = response.codings[i];
  return 8.0 * coding.mean_bytes(coding.bucket) / coding.bucket;
}

}  // namespace

void Engine::run() {
  name_thread("qsgd-engine");
  gpu::Device::own_this_thread();
  // Held to the end: no other thread may execute operations that fail.
  std::unique_lock<std::mutex> driving(driving_);
  try {
    if (measures_at_start()) learn_machine();
    while (!agreement_.is_over()) {
      abort_->check();
      const bool busy = make_progress();
      carry_out_agreed();
      sleep_if_idle(busy, driving);
    }
    while (executor_.end_landed()) abort_->check();
    agreement_.flush();
  } catch (const std::exception& error) {
    end_job(error.what());
  }
  sets_.close();  // before the memory of failed operations is released
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    leaving_ = true;
  }
  entries_.fail_all(abort_->raised() ? abort_->message() : "the engine has shut down");
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

// Submits new operations, receives messages, and agrees on what to execute. Returns true if
// anything happened.
bool Engine::make_progress() {
  bool busy = news_.load(std::memory_order_acquire) && collect();
  busy |= !late_.empty() && submit_ready();
  busy |= executor_.end_landed();
  busy |= agreement_.make_progress();
  agreement_.watch_waits(entries_, [this] { return news_.load() || !late_.empty(); });
  return busy;
}

bool Engine::collect() {
  bool leaving = false;
  Tuning tuning;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    news_.store(false, std::memory_order_relaxed);
    collected_.swap(fresh_);
    leaving = leaving_ && !agreement_.has_left();
    std::swap(tuning, tuning_);
    if (!forgotten_.empty()) sets_.forget_owed(std::exchange(forgotten_, {}));
  }
  agreement_.tune(tuning);
  const bool busy = !collected_.empty() || leaving;
  for (Submission& submission : collected_) {
    const Operation& operation = *submission.operation;
    if (!operation.coding || operation.coding->nmse_budget <= 0) continue;
    if (!sets_.has(operation.set)) continue;
    const QualityLog& quality = sets_.operations(operation.set).reducer().quality();
    submission.nmse = quality.last_nmse(operation.name);
  }
  const auto late = std::stable_partition(
      collected_.begin(), collected_.end(),
      [](const Submission& submission) { return submission.ready == nullptr; });
  std::move(late, collected_.end(), std::back_inserter(late_));
  collected_.erase(late, collected_.end());
  if (!collected_.empty()) agreement_.submit(collected_);
  if (leaving && late_.empty()) agreement_.leave(reason_);  // the others need what was started
  collected_.clear();
  return busy;
}

// Submits tensors on a device once they are computed, so that tensors which are ready are fused,
// and no rank waits for others. Returns true if any was submitted.
bool Engine::submit_ready() {
  std::vector<const gpu::Mark*> waiting;  // first of each stream; a stream executes in order
  const auto is_late = [&](const Submission& submission) {
    const gpu::Mark& mark = *submission.ready;
    for (const gpu::Mark* other : waiting) {
      if (&other->device() == &mark.device() && other->stream() == mark.stream()) return true;
    }
    if (submission.ready->passed()) return false;
    waiting.push_back(&mark);
    return true;
  };
  const auto ready = std::stable_partition(late_.begin(), late_.end(), is_late);
  if (ready == late_.end()) return false;
  for (auto it = ready; it != late_.end(); ++it) {
    Entry* const entry = entries_.find(it->operation->key());  // null: it has failed already
    // Copy it already: other ranks may be late.
    if (entry != nullptr && is_staged(*entry) && !may_stay(*it->operation) &&
        entry->device()->pinned_bytes() < kMostAhead) {
      entry->copy = std::make_shared<HostCopy>(*entry);
    }
  }
  std::vector<Submission> submissions(std::make_move_iterator(ready),
                                      std::make_move_iterator(late_.end()));
  late_.erase(ready, late_.end());
  agreement_.submit(submissions);
  if (late_.empty()) news_.store(true);  // this rank may be about to leave
  return true;
}

bool Engine::may_stay(const Operation& operation) {
  return sets_.has(operation.set) && sets_.operations(operation.set).may_stay(operation);
}

void Engine::carry_out_agreed() {
  executor_.carry_out(agreement_.take_agreed());
  if (agreement_.take_measures_next()) learn_machine();
}

// Sleeps if nothing is to be done: without wake-ups on a rank that gets no messages then, or with
// rare ones if ranks below it may leave or submit; and in short intervals while messages are
// expected. A new submission ends either sleep, and other threads may drive the engine meanwhile.
void Engine::sleep_if_idle(bool busy, std::unique_lock<std::mutex>& driving) {
  if (busy) {
    idle_since_.reset();
    return backoff_.reset();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const auto work = [this] { return !entries_.empty() || leaving_ || abort_->raised(); };
  if (!agreement_.must_poll() && !work()) {
    const auto nap = agreement_.has_sets_of_others() ? kShortNap : kLongNap;
    driving.unlock();
    if (rank() == 0 || agreement_.has_children()) {
      changed_.wait_for(lock, nap, work);
    } else {
      changed_.wait(lock, work);
    }
    lock.unlock();
    driving.lock();
    return backoff_.reset();
  }
  lock.unlock();
  std::chrono::nanoseconds nap = backoff_.pause_or_nap();
  if (nap.count() == 0) return;
  if (agreement_.is_intermediate()) {
    const auto now = std::chrono::steady_clock::now();
    if (!idle_since_) idle_since_ = now;
    nap = std::min(nap, std::max(kRelayNap, (now - *idle_since_) / kRelayShare));
  }
  driving.unlock();
  lock.lock();
  changed_.wait_for(lock, nap, [this] { return news_.load() || abort_->raised(); });
  lock.unlock();
  driving.lock();
}

// Measures or loads the machine for the planner; all ranks call it together.
void Engine::learn_machine() {
  Machine machine;
  if (config_.machine) {
    machine = *config_.machine;
  } else {
    machine = trials_.run([&] {
      return measure(communicator_, ranks_per_node(node_.get()), usual_codes(), rotated_codes());
    });
    if (rank() == 0 && config_.measured) config_.measured(machine);
  }
  PlanRequest request;
  const Algorithm algorithm = *config_.agreement.tuning.algorithm;
  (is_compressed(algorithm) ? request.coded : request.exact) = algorithm;
  agreement_.set_machine(machine, request, workers_.get());
  trials_.know(std::move(machine));
  wake_all();
}

// Splits the `wire_bytes` of fused tensors in proportion to the bits of their elements.
void Engine::note_work(const Work& done) {
  if (!timeline_->on()) return;
  const auto& [response, entries, outcomes, start, wire_bytes] = done;
  std::vector<double> bits;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Operation& o = *entries[i]->operation;
    bits.push_back(static_cast<double>(o.count()) * bits_per_element(response, i, o.args.dtype));
  }
  const double all_bits = std::accumulate(bits.begin(), bits.end(), 0.0);
  const Reducer& reducer = sets_.operations(response.set).reducer();
  const Exchange& exchange = reducer.last_exchange();
  for (size_t i = 0; i < entries.size(); ++i) {
    const Operation& o = *entries[i]->operation;
    Timeline::Work work;
    work.tensor = Timeline::row_of(response.set, o.name);
    work.process_set = static_cast<uint64_t>(response.set);
    work.operation = describe(o.kind);
    work.begin = start;
    work.elements = o.count();
    const double share = all_bits > 0 ? bits[i] / all_bits : 0;
    work.wire_bytes = static_cast<uint64_t>(share * static_cast<double>(wire_bytes));
    work.bits = bits_per_element(response, i, o.args.dtype);
    work.fused = entries.size();
    work.error = outcomes[i].fault.message;
    if (!response.codings.empty()) {
      work.nmse = reducer.quality().last_nmse(o.name);
      work.coding_s = share * exchange.coding_s;
    }
    if (o.kind == OpKind::kAllreduce) {
      work.algorithm = exchange.algorithm;
      work.exchange = exchange.begin;
      work.exchange_end = exchange.end;
    }
    timeline_->done(work);
  }
}

}  // namespace qsgd
