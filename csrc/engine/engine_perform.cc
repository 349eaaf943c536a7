// A thread of the program at the helm: it waits for one operation, and carries it out meanwhile.
#include <utility>

#include "engine/engine.h"

namespace qsgd {
namespace {

using Clock = std::chrono::steady_clock;

// What takes longer is for the engine's thread, beside which signals are handled and two changes of
// thread are nothing: waiting for ranks that still compute, and moving much.
constexpr std::chrono::milliseconds kPatience{1};
constexpr unsigned kFreeLooks = 64;
constexpr size_t kMostBytes = size_t{16} << 20;

thread_local bool at_helm = false;

class AtHelm {
 public:
  AtHelm() { at_helm = true; }
  ~AtHelm() { at_helm = false; }
  AtHelm(const AtHelm&) = delete;
  AtHelm& operator=(const AtHelm&) = delete;
};

bool is_all(const std::vector<Response>& responses, const Key& key) {
  if (responses.size() != 1) return false;
  const Response& only = responses.front();
  return only.names.size() == 1 && Key(only.set, only.names.front()) == key;
}

}  // namespace

void Engine::check_not_performing(const char* call) {
  if (!at_helm) return;
  throw usage_error(
      std::string(call) +
      " by a handler of signals, in the midst of another operation, which cannot go "
      "on before the handler returns; set a flag there, and look at it between steps");
}

std::shared_ptr<Handle> Engine::perform(Submission submission, const void* in, void* out,
                                        std::shared_ptr<void> keep,
                                        std::function<bool()> interrupted) {
  const Key key(submission.set, submission.name);
  const bool brief = submission.size_bytes() <= kMostBytes;
  std::shared_ptr<Handle> handle = enter(std::move(submission), in, out, std::move(keep));
  if (brief) take_turns_for(key, *handle, std::move(interrupted));
  if (!handle->done()) changed_.notify_all();  // the engine's thread goes on with it
  return handle;
}

void Engine::take_turns_for(const Key& key, Handle& handle, std::function<bool()> interrupted) {
  const std::unique_lock<std::mutex> helm(helm_, std::try_to_lock);
  if (!helm) return;
  const AtHelm here;
  const Waiting waiting(handle);
  const Interruptible waits(std::move(interrupted));
  unsigned looks = 0;
  Clock::time_point until;
  Backoff backoff;
  try {
    while (!handle.done() && !abort_->raised()) {
      const bool busy = turn();
      if (measures_next_) return;
      if (!agreed_.empty()) {
        if (!is_all(agreed_, key)) return;
        carry_out_agreed();
      } else if (busy) {
        backoff.reset();
      } else {
        // Most are done before the first look at the clock.
        if (++looks == kFreeLooks) until = Clock::now() + kPatience;
        if (looks % kFreeLooks == 0 && Clock::now() > until) return;
        backoff.pause();
      }
    }
  } catch (const std::exception& error) {
    fall(error.what());
  }
}

}  // namespace qsgd
