#include "transport/transport.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "common/error.h"

namespace qsgd {
namespace {

// By turns and by time: in shared memory a turn takes some 0.1 us, over TCP each request that is
// looked at asks the kernel about every connection, which takes the core for 1 us.
constexpr unsigned kSpins = 64;
constexpr std::chrono::microseconds kSpinning{20};
constexpr std::chrono::microseconds kYielding{200};

// Each nap costs the core some 20 us, and a rank that computes there its time slice. Growing by a
// fifth, they end at most a fifth of the wait too late, and are few: 9 in 1 ms, 17 in 5 ms, 53 in
// 100 ms, which ranks that share cores often wait for one another.
constexpr unsigned kGrowing = 22;  // to 2.8 ms
constexpr std::chrono::nanoseconds kFirstNap = std::chrono::microseconds(50);

// A yield that returns so late has given the core to a thread that computes. A sleeper is woken
// in the midst of that thread's time slice, a yielder at its end, some milliseconds later.
constexpr std::chrono::microseconds kLateYield{500};
constexpr unsigned kCrowdedSpins = 4;  // whoever is waited for may need this core
constexpr unsigned long kTimerSlackNs = 1000;
thread_local int crowded = 0;  // naps to take before a yield is tried again
// So many after a late yield, twice as many after a further one: what passes is soon forgotten, and
// of what stays a yield in a thousand naps is lost.
constexpr int kFewestNaps = 30;
constexpr int kMostNaps = 1000;
thread_local int naps_when_crowded = kFewestNaps;

// A wait is long when so much has passed: every message of a short operation has come by then.
constexpr std::chrono::seconds kInterruptible{1};
thread_local Interruptible* interruptible = nullptr;

// The `number`th of a wait.
std::chrono::nanoseconds nap(unsigned number) {
  // The kernel adds up to 50 us to a sleep, unless told otherwise, to save wake-ups.
  static thread_local const int exact = prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  static_cast<void>(exact);  // where it is refused, sleeps are a little longer
  std::chrono::nanoseconds duration = kFirstNap;
  for (unsigned i = 0; i < std::min(number, kGrowing); ++i) duration += duration / 5;
  return duration;
}

// Leaves the core's resources to its other thread for a moment.
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void AbortFlag::raise(const std::string& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (raised_.load(std::memory_order_relaxed)) return;  // the first cause is the one to report
  message_ = message;
  raised_.store(true, std::memory_order_release);
}

std::string AbortFlag::message() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

void AbortFlag::check() const {
  if (raised()) throw Error(ErrorKind::kRankFailed, message());
}

RequestPtr Transport::isend(int peer, Tag tag, const void* data, size_t size_bytes,
                            Completion completion) {
  bytes_sent_.fetch_add(size_bytes, std::memory_order_relaxed);
  return isend_impl(peer, tag, data, size_bytes, completion);
}

void Transport::wait(std::vector<RequestPtr>& requests) {
  Backoff backoff;
  while (true) {
    const size_t before = requests.size();
    requests.erase(std::remove_if(requests.begin(), requests.end(),
                                  [](RequestPtr& request) { return request->test(); }),
                   requests.end());
    if (requests.empty()) return;
    abort_->check();
    if (requests.size() < before) backoff.reset();
    backoff.pause();
  }
}

void Transport::wait(RequestPtr& request) {
  Backoff backoff;
  while (!request->test()) {
    abort_->check();
    backoff.pause();
  }
}

Interruptible::Interruptible(std::function<bool()> interrupted)
    : interrupted_(std::move(interrupted)),
      outer_(interruptible),
      next_(std::chrono::steady_clock::now() + kInterruptible) {
  interruptible = this;
}

Interruptible::~Interruptible() { interruptible = outer_; }

void Interruptible::check() {
  Interruptible* const self = interruptible;
  if (self == nullptr || !self->interrupted_) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < self->next_) return;
  self->next_ = now + kInterruptible;
  if (!self->interrupted_()) return;
  throw Error(ErrorKind::kRankFailed,
              "the program was interrupted in the midst of an operation that others take part in");
}

void Backoff::pause() {
  const std::chrono::nanoseconds nap = pause_or_nap();
  if (nap.count() == 0) return;
  Interruptible::check();
  std::this_thread::sleep_for(nap);
}

bool Backoff::spins_on() {
  if (long_) return false;
  ++turns_;
  long_ = turns_ > (crowded > 0 ? kCrowdedSpins : kSpins);
  if ((turns_ & (turns_ - 1)) != 0) return !long_;  // a look at the clock costs as much as a turn
  const auto now = std::chrono::steady_clock::now();
  if (turns_ == 1) since_ = now;
  long_ |= now - since_ > kSpinning;
  return !long_;
}

std::chrono::nanoseconds Backoff::pause_or_nap() {
  constexpr std::chrono::nanoseconds kNone{0};
  if (spins_on()) {
    relax();
    return kNone;
  }
  if (crowded > 0) {
    --crowded;
    return nap(++naps_);
  }
  const auto before = std::chrono::steady_clock::now();
  if (yields_until_ == std::chrono::steady_clock::time_point()) yields_until_ = before + kYielding;
  if (before > yields_until_) return nap(++naps_);
  sched_yield();  // ranks often outnumber cores on a laptop: the peer needs this one
  if (std::chrono::steady_clock::now() - before <= kLateYield) {
    naps_when_crowded = kFewestNaps;
    return kNone;
  }
  crowded = naps_when_crowded;
  naps_when_crowded = std::min(2 * naps_when_crowded, kMostNaps);
  return kNone;
}

}  // namespace qsgd
