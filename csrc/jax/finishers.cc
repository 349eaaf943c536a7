#include "jax/finishers.h"

#include <thread>
#include <utility>

#include "common/thread_name.h"

namespace qsgd {

Finishers& Finishers::of_process() {
  static Finishers* const all = new Finishers;  // NOLINT: never destroyed, see the header
  return *all;
}

void Finishers::run(std::function<void()> task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (idle_ < tasks_.size()) {
      ++idle_;
      std::thread([this] { work(); }).detach();
    }
  }
  changed_.notify_one();
}

void Finishers::work() {
  name_thread("qsgd-jax");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    --idle_;
    lock.unlock();
    task();
    lock.lock();
    ++idle_;
  }
}

}  // namespace qsgd
