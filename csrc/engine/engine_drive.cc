// Execution of the engine's work by a thread of the program that waits for one operation.
#include "engine/engine.h"

namespace qsgd {
namespace {

using Clock = std::chrono::steady_clock;

// Longer work is left to the engine's thread, because signals can be handled meanwhile and two
// context switches are negligible: waiting for ranks that still compute, and large tensors.
constexpr std::chrono::milliseconds kPatience{1};
constexpr unsigned kFreeLooks = 64;
constexpr size_t kMostBytes = size_t{16} << 20;

thread_local bool drives_here = false;

class Driving {
 public:
  Driving() { drives_here = true; }
  ~Driving() { drives_here = false; }
  Driving(const Driving&) = delete;
  Driving& operator=(const Driving&) = delete;
};

bool is_all(const std::vector<Response>& responses, const Operation& operation) {
  if (responses.size() != 1) return false;
  const Response& only = responses.front();
  return only.names.size() == 1 && only.set == operation.set &&
         only.names.front() == operation.name;
}

}  // namespace

void Engine::check_not_driving(const char* call) {
  if (!drives_here) return;
  throw usage_error(
      std::string(call) +
      " by a signal handler during another operation, which cannot continue before the "
      "handler returns; set a flag there, and check it between steps");
}

void Engine::drive_until_done(const Operation& operation, Handle& handle,
                              const std::function<bool()>& interrupted) {
  if (operation.size_bytes() > kMostBytes) return;
  const std::unique_lock<std::mutex> alone(driving_, std::try_to_lock);
  // Callbacks of other operations may submit, which this thread could not do while it drives.
  if (!alone || executor_.is_landing()) return;
  const Driving here;
  const Waiting waiting(handle);
  const Interruptible waits(interrupted);
  unsigned looks = 0;
  Clock::time_point until;
  Backoff backoff;
  try {
    while (!handle.done() && !abort_->raised()) {
      const bool busy = make_progress();
      if (agreement_.measures_next()) return;
      if (!agreement_.agreed().empty()) {
        if (!is_all(agreement_.agreed(), operation)) return;
        carry_out_agreed();
      } else if (busy) {
        backoff.reset();
      } else {
        // Most operations are done before the first look at the clock.
        if (++looks == kFreeLooks) until = Clock::now() + kPatience;
        if (looks % kFreeLooks == 0 && Clock::now() > until) return;
        backoff.pause();
      }
    }
  } catch (const std::exception& error) {
    end_job(error.what());
  }
}

}  // namespace qsgd
