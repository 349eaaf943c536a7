#include "transport/transport.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "common/error.h"

namespace qsgd {
namespace {

constexpr unsigned kSpins = 32;
constexpr unsigned kYields = 2000;
constexpr unsigned kNapsBeforeLong = 200;
constexpr std::chrono::microseconds kShortNap{50};
constexpr std::chrono::microseconds kLongNap{500};

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

RequestPtr Transport::isend(int peer, Tag tag, const void* data, size_t size_bytes) {
  bytes_sent_.fetch_add(size_bytes, std::memory_order_relaxed);
  return isend_impl(peer, tag, data, size_bytes);
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

void Backoff::pause() {
  ++turns_;
  if (turns_ <= kSpins) return;
  if (turns_ <= kSpins + kYields) {
    sched_yield();  // ranks often outnumber cores on a laptop: the peer needs this one
    return;
  }
  std::this_thread::sleep_for(turns_ <= kSpins + kYields + kNapsBeforeLong ? kShortNap : kLongNap);
}

}  // namespace qsgd
