// A pool of threads for work that is divided into independent tasks.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace qsgd {

// `threads` includes the caller, which takes part; with 1, no thread is started. Where the system
// limits threads, there may be fewer.
class Workers {
 public:
  explicit Workers(int threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int threads() const { return static_cast<int>(others_.size()) + 1; }

  // Calls task(0) ... task(tasks - 1), each once, in any order and on any of the threads; blocks
  // until all are done. Tasks must not throw. One run at a time.
  void run(size_t tasks, const std::function<void(size_t)>& task);

 private:
  void serve();
  void work(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable begun_;
  std::condition_variable done_;
  const std::function<void(size_t)>* task_ = nullptr;  // valid while left_ > 0
  size_t next_ = 0;
  size_t tasks_ = 0;
  size_t left_ = 0;
  bool closing_ = false;
  std::vector<std::thread> others_;
};

}  // namespace qsgd
