#include "common/workers.h"

#include <system_error>

#include "common/thread_name.h"

namespace qsgd {

Workers::Workers(int threads) {
  try {
    for (int i = 1; i < threads; ++i) others_.emplace_back([this] { serve(); });
  } catch (const std::system_error&) {  // a limit of the system: go on with the threads there are
  }
}

Workers::~Workers() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  begun_.notify_all();
  for (std::thread& other : others_) other.join();
}

void Workers::run(size_t tasks, const std::function<void(size_t)>& task) {
  if (others_.empty() || tasks <= 1) {  // no thread to wake
    for (size_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  task_ = &task;
  next_ = 0;
  tasks_ = left_ = tasks;
  begun_.notify_all();
  work(lock);
  done_.wait(lock, [this] { return left_ == 0; });
}

// Executes tasks until all have been started.
void Workers::work(std::unique_lock<std::mutex>& lock) {
  while (next_ < tasks_) {
    const size_t mine = next_++;
    const std::function<void(size_t)>& task = *task_;
    lock.unlock();
    task(mine);
    lock.lock();
    if (--left_ == 0) done_.notify_one();
  }
}

void Workers::serve() {
  name_thread("qsgd-worker");
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_) {
    work(lock);
    begun_.wait(lock, [this] { return closing_ || next_ < tasks_; });
  }
}

}  // namespace qsgd
