#include "engine/engine.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "common/coarse_clock.h"

namespace qsgd {
namespace {

const char* const kJoinName = "join";

Error name_taken(const std::string& name) {
  return usage_error("tensor '" + name +
                     "' is already being worked on; wait for its handle first, or give each "
                     "operation a name of its own");
}

}  // namespace

Engine::Engine(std::unique_ptr<Transport> transport, EngineConfig config,
               std::unique_ptr<SharedNode> node)
    : transport_(std::move(transport)),
      abort_(transport_->shared_abort_flag()),
      config_(std::move(config)),
      node_(std::move(node)),
      workers_(config_.threads > 1 ? std::make_unique<Workers>(config_.threads) : nullptr),
      communicator_{*transport_, node_.get(), workers_.get()},
      timeline_(std::make_shared<Timeline>(transport_->rank())),
      devices_(config_.gpu_library, abort_),
      steps_(
          config_.kept_steps, [this] { return work_so_far(); },
          [this](uint64_t step, auto begin, auto end) {
            if (timeline_->on()) timeline_->stepped(step, begin, end);
          }),
      trials_(communicator_),
      agreement_(
          *transport_, node_.get(), *timeline_, config_.agreement,
          [this](const std::string& message) { give_up(message); },
          [this] { return everyone_.may_sum_in_nodes(); }),
      sets_(communicator_, config_.reducing),
      everyone_(sets_.operations(0)),
      executor_(communicator_, entries_, sets_, [this](const Work& work) { note_work(work); }),
      thread_([this] { run(); }) {}

Engine::~Engine() {
  timeline_->stop();
  if (!thread_.joinable()) return;
  give_up("rank " + std::to_string(rank()) + " stopped without leaving the job");
  thread_.join();
}

std::shared_ptr<Handle> Engine::start(OperationPtr operation, TensorMemory memory,
                                      const Caller& caller) {
  check_not_driving("an operation was submitted");
  if (operation->name.empty()) operation = named(*operation);
  std::shared_ptr<Handle> handle;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    handle = enter(operation, memory, /*foreign=*/false);
  }
  // Members of a group wait for one another.
  if (caller.waits && !operation->group) {
    drive_until_done(*operation, *handle, caller.interrupted);
  }
  if (!handle->done()) changed_.notify_all();  // the engine's thread continues
  return handle;
}

std::vector<std::shared_ptr<Handle>> Engine::start_all(
    std::vector<std::pair<OperationPtr, TensorMemory>> operations, bool foreign) {
  check_not_driving("an operation was submitted");
  for (auto& [operation, memory] : operations) {
    if (operation->name.empty()) operation = named(*operation);
  }
  std::vector<std::shared_ptr<Handle>> handles;
  handles.reserve(operations.size());
  const auto wake = [this](void*) { changed_.notify_all(); };
  const std::unique_ptr<void, decltype(wake)> woken(this, wake);  // also if one is refused
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [operation, memory] : operations) {
    // Started in part, the call would wait for ranks that refuse other parts of it.
    if (!abort_->raised() && entries_.has(operation->key())) throw name_taken(operation->name);
  }
  for (auto& [operation, memory] : operations) {
    handles.push_back(enter(std::move(operation), memory, foreign));
  }
  return handles;
}

// Requires mutex_. If the operation is refused, `memory` remains the caller's, who releases it
// without mutex_: that may need the GIL, and the thread that has the GIL may wait for mutex_.
std::shared_ptr<Handle> Engine::enter(OperationPtr operation, TensorMemory& memory, bool foreign) {
  if (abort_->raised()) abort_->set_noticed();
  abort_->check();
  check_fit(*operation);
  if (entries_.has(operation->key())) throw name_taken(operation->name);
  auto handle = std::make_shared<Handle>(abort_, std::move(memory.keep), timeline_, waits_);
  std::shared_ptr<gpu::Mark> ready = std::move(memory.ready);
  operation = placed(std::move(operation), ready != nullptr);
  entries_.add({operation, memory.in, memory.out, handle, ready});
  if (operation->kind == OpKind::kAllreduce && operation->lasting) {
    steps_.started(*operation, foreign);
  }
  if (operation->kind == OpKind::kJoin) {
    ++joins_;
    numbers_.clear();
  }
  fresh_.emplace_back();
  fresh_.back().operation = std::move(operation);
  fresh_.back().ready = std::move(ready);
  news_.store(true, std::memory_order_release);
  return handle;
}

void Engine::check_fit(const Operation& operation) const {
  if (leaving_) {
    throw usage_error("'" + operation.name + "' was submitted after shutdown(); call init()");
  }
  check(operation, *sets_.ranks_for(operation), size());
  if (operation.kind == OpKind::kRemoveSet) {
    sets_.check_removable(static_cast<int32_t>(operation.ranks.front()));
  }
  if (entries_.has({0, kJoinName}, OpKind::kJoin)) {
    throw usage_error("'" + operation.name + "' was submitted by rank " + std::to_string(rank()) +
                      " after join(); wait for that first");
  }
}

// Requires mutex_. Returns the operation with on_device set. For a lasting operation it returns the
// same object each time, because others find it by its address.
OperationPtr Engine::placed(OperationPtr operation, bool on_device) {
  if (operation->on_device == on_device) return operation;
  if (placed_.size() >= kMaxBook) placed_.clear();
  OperationPtr fresh;
  OperationPtr& its = operation->lasting ? placed_[operation] : fresh;
  if (its == nullptr) {
    Operation there = *operation;
    there.on_device = on_device;
    its = std::make_shared<const Operation>(std::move(there));
  }
  return its;
}

OperationPtr Engine::named(Operation operation) {
  operation.name = next_name(operation.kind, operation.set);
  return std::make_shared<const Operation>(std::move(operation));
}

std::string Engine::next_name(OpKind kind, int32_t set) {
  if (kind == OpKind::kJoin) return kJoinName;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string place = set == 0 ? "" : "set" + std::to_string(set) + ".";
  if (joins_ > 0) place += "join" + std::to_string(joins_) + ".";
  const uint64_t number = numbers_[{kind, set}]++;
  return std::string(describe(kind)) + ".unnamed." + place + std::to_string(number);
}

void Engine::tune(const Tuning& tuning) {
  if (rank() != 0) {
    throw usage_error("rank " + std::to_string(rank()) +
                      " cannot tune; only rank 0 can, for all ranks");
  }
  if (tuning.algorithm && *tuning.algorithm != Algorithm::kAuto) {
    qsgd::check_fit(communicator_, is_compressed(*tuning.algorithm), *tuning.algorithm);
  }
  const int bits = tuning.bits.value_or(kPlainBits);
  if (bits != 2 && bits != 4 && bits != 8 && bits != kPlainBits) {
    throw usage_error("tune(bits=" + std::to_string(bits) + "): use 2, 4, 8 or 32");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  tuning_.update(tuning);
  news_.store(true, std::memory_order_release);
}

void Engine::shutdown(const std::string& reason, double patience_s) {
  if (!thread_.joinable()) return;
  check_not_driving("shutdown() was called");
  bool in_time;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    leaving_ = true;
    news_.store(true, std::memory_order_release);
    reason_ = reason.substr(0, kMaxName);
    changed_.notify_all();
    in_time = changed_.wait_for(lock, Seconds(patience_s), [this] { return ended_; });
  }
  if (!in_time) give_up("rank " + std::to_string(rank()) + " left the job (" + reason + ")");
  thread_.join();
  timeline_->stop();
  if (lifeline_) lifeline_->close(in_time);
}

void Engine::give_up(const std::string& message) {
  if (lifeline_) lifeline_->announce(message);
  abort(message);
}

void Engine::abort(const std::string& message) {
  abort_->raise(message);
  wake_all();
}

// Ends the job on all ranks after an error of this one.
void Engine::end_job(const std::string& cause) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!abort_->raised() && lifeline_) {
    lifeline_->announce("rank " + std::to_string(rank()) + " cannot continue: " + cause);
  }
  abort_->raise(cause);
}

void Engine::wake_all() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
  }  // a sleeper has either not checked its condition yet, or sleeps already
  changed_.notify_all();
}

void Engine::watch(std::vector<Lifeline::Peer> peers, double grace_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  lifeline_ =
      std::make_unique<Lifeline>(rank(), std::move(peers), abort_, [this] { wake_all(); }, grace_s);
}

std::optional<Machine> Engine::machine() {
  if (!measures_at_start()) return trials_.machine();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return trials_.machine() || ended_; });
  if (!trials_.machine()) {
    throw internal_error("the machine was not measured: " + abort_->message());
  }
  return trials_.machine();
}

EngineStats Engine::stats() const {
  EngineStats stats{executor_.done()};
  const BytesGiven given = trials_.traffic();
  stats.wire_bytes = given.total();
  stats.shared_memory_bytes = given.in_memory;
  const BytesGiven control = agreement_.bytes_sent();
  stats.control_bytes = control.total();
  stats.mailed_bytes = control.in_memory;
  stats.messages_heard = agreement_.messages_heard();
  stats.steps = steps_.steps();
  stats.wait_time_s = waits_->total_s();
  return stats;
}

StepWork Engine::work_so_far() const {
  const WorkDone done = executor_.done();
  return {waits_->total_s(), done.comm_time_s, done.coding_time_s, trials_.traffic().total()};
}

// Locks the engine while nothing is coded: coding needs an entry.
std::unique_lock<std::mutex> Engine::lock_idle() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (entries_.empty()) return lock;
  throw usage_error(
      "rank " + std::to_string(rank()) + ": " + std::to_string(entries_.size()) +
      " operations are under way, '" + entries_.example() +
      "' among them, while the state of coding is saved or restored; wait for their " +
      "handles first (optimizer.step() does)");
}

std::map<std::string, size_t> Engine::owed_counts(int32_t set) {
  const auto lock = lock_idle();
  Reducer* const reducer = sets_.reducer(set);
  return reducer == nullptr ? std::map<std::string, size_t>() : reducer->residuals().counts();
}

std::vector<float> Engine::owed_share(const std::string& name, int32_t set) {
  const auto lock = lock_idle();
  Reducer* const reducer = sets_.reducer(set);
  return reducer == nullptr ? std::vector<float>() : reducer->residuals().share(name);
}

void Engine::restore_owed(std::map<std::string, std::vector<float>> owed, int32_t set) {
  const auto lock = lock_idle();
  Reducer* const reducer = sets_.reducer(set);
  if (reducer != nullptr) reducer->residuals().restore(std::move(owed));
}

void Engine::forget_owed(std::vector<std::string> names) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::move(names.begin(), names.end(), std::back_inserter(forgotten_));
  news_.store(true, std::memory_order_release);
}

std::map<std::string, uint32_t> Engine::coded_steps() {
  const auto lock = lock_idle();
  return everyone_.reducer().steps();
}

void Engine::restore_coded_steps(std::map<std::string, uint32_t> steps) {
  const auto lock = lock_idle();
  everyone_.reducer().steps() = std::move(steps);
}

}  // namespace qsgd
