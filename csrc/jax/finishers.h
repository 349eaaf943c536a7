// Threads on which programs go on after an operation.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace qsgd {

// XLA carries out what follows an asynchronous call on the thread that completes it. That must not
// be the engine's. There is always an idle thread for a task, because what follows may wait (in a
// Python callback) for another program of this kind.
class Finishers {
 public:
  // Lives as long as the process: XLA may be at work in its threads until the very end.
  static Finishers& of_process();

  void run(std::function<void()> task);

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;  // threads without a task, but for those that are waiting in tasks_
};

}  // namespace qsgd
