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

// Limits for spinning, by turns and by time: in shared memory a turn takes about 0.1 us; over TCP
// each tested request polls every connection, which takes 1 us of a core.
constexpr unsigned kSpins = 64;
constexpr std::chrono::microseconds kSpinning{20};
constexpr std::chrono::microseconds kYielding{200};

// Each sleep costs the core about 20 us, and may cost a rank that computes there its time slice.
// Growing by a fifth, sleeps end at most a fifth of the wait too late, and are few: 9 in 1 ms, 17
// in 5 ms, 53 in 100 ms, which ranks that share cores often wait for each other.
constexpr unsigned kGrowing = 22;  // to 2.8 ms
constexpr std::chrono::nanoseconds kFirstNap = std::chrono::microseconds(50);

// A yield that takes this long has given the core to a thread that computes. A sleeping thread is
// woken within that thread's time slice, a yielding one at its end, some milliseconds later.
constexpr std::chrono::microseconds kLateYield{500};
constexpr unsigned kCrowdedSpins = 4;  // the awaited rank may need this core
constexpr unsigned long kTimerSlackNs = 1000;
thread_local int crowded = 0;  // sleeps before a yield is tried again
// Number of sleeps after a late yield, doubled after each further one: temporary load is soon
// forgotten, and with permanent load only one yield in a thousand sleeps is lost.
constexpr int kFewestNaps = 30;
constexpr int kMostNaps = 1000;
thread_local int naps_when_crowded = kFewestNaps;

// A wait of this duration is long: every message of a short operation has arrived by then.
constexpr std::chrono::seconds kInterruptible{1};
thread_local Interruptible* interruptible = nullptr;

// Duration of the `number`th sleep of a wait.
std::chrono::nanoseconds nap(unsigned number) {
  // By default, the kernel adds up to 50 us to a sleep, to save wake-ups.
  static thread_local const int exact = prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  static_cast<void>(exact);  // if refused, sleeps are a little longer
  std::chrono::nanoseconds duration = kFirstNap;
  for (unsigned i = 0; i < std::min(number, kGrowing); ++i) duration += duration / 5;
  return duration;
}

// Leaves the core's resources to its other hardware thread for a moment.
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
  if (raised_.load(std::memory_order_relaxed)) return;  // report the first cause
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
              "the program was interrupted during an operation in which other ranks take part");
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
  if ((turns_ & (turns_ - 1)) != 0) return !long_;  // reading the clock costs as much as a turn
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
  sched_yield();  // if ranks outnumber cores, the peer may need this core
  if (std::chrono::steady_clock::now() - before <= kLateYield) {
    naps_when_crowded = kFewestNaps;
    return kNone;
  }
  crowded = naps_when_crowded;
  naps_when_crowded = std::min(2 * naps_when_crowded, kMostNaps);
  return kNone;
}

}  // namespace qsgd
