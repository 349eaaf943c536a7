// Threads on which programs continue after an operation.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace qsgd {

// XLA continues after an asynchronous call on the thread that completes it. That must not be the
// engine's thread. There is always an idle thread for a task, because the continuation may wait (in
// a Python callback) for another program's operation.
class Finishers {
 public:
  // Never destroyed, because XLA may use its threads until the process ends.
  static Finishers& of_process();

  void run(std::function<void()> task);

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;  // threads without a task
};

}  // namespace qsgd
