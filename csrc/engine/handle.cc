#include "engine/handle.h"

namespace qsgd {

Handle::Handle(std::shared_ptr<AbortFlag> abort, std::shared_ptr<void> keep,
               std::shared_ptr<Timeline> timeline, std::shared_ptr<WaitMeter> waits)
    : abort_(std::move(abort)),
      timeline_(std::move(timeline)),
      waits_(std::move(waits)),
      keep_(std::move(keep)) {}

Handle::~Handle() {
  // MPI may still use the memory of an operation that was given up, for an unknown time.
  const bool lost = !done() || fault_.kind == ErrorKind::kRankFailed;
  if (lost && keep_) new std::shared_ptr<void>(std::move(keep_));
}

bool Handle::done() const { return done_.load(std::memory_order_acquire); }

bool Handle::lost() const { return done() && fault_.kind == ErrorKind::kRankFailed; }

bool Handle::wait_for(std::chrono::milliseconds timeout) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return done(); });
}

void Handle::begin_wait(Timeline::Clock::time_point now) {
  waits_->begin(now);
  mark_waited_for(now);
}

void Handle::mark_waited_for(Timeline::Clock::time_point now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (waiting_++ == 0) waiting_since_ = now;
}

void Handle::end_wait(Timeline::Clock::time_point since) {
  waits_->end(Timeline::Clock::now());
  if (timeline_->on()) timeline_->waited(since);
  const std::lock_guard<std::mutex> lock(mutex_);
  --waiting_;
}

bool Handle::waited_for(double seconds) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Seconds waited = Timeline::Clock::now() - waiting_since_;
  return !done() && waiting_ > 0 && waited.count() >= seconds;
}

void Handle::check() const {
  if (!done() || !fault_) return;
  if (fault_.kind == ErrorKind::kRankFailed) abort_->set_noticed();
  throw Error(fault_.kind, fault_.message);
}

void Handle::release_memory() {
  std::shared_ptr<void> keep;  // released after the lock: its destructor may run any code
  const std::lock_guard<std::mutex> lock(mutex_);
  if (done() && fault_.kind != ErrorKind::kRankFailed) keep.swap(keep_);
}

std::shared_ptr<const Result> Handle::result() const {
  check();
  if (!done()) throw usage_error("the operation is still under way; wait for its handle first");
  return result_;
}

void Handle::when_done(std::function<void()> callback) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!done()) return callbacks_.push_back(std::move(callback));
  }
  callback();
}

void Handle::finish(Result result) { end({}, std::move(result)); }

void Handle::fail(Fault fault) { end(std::move(fault), {}); }

void Handle::end(Fault fault, Result result) {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (done()) return;
    fault_ = std::move(fault);
    result_ = std::make_shared<const Result>(std::move(result));
    done_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
  }
  changed_.notify_all();
  for (const auto& callback : callbacks) callback();
}

}  // namespace qsgd
