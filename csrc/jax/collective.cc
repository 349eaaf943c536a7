#include "jax/collective.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "common/thread_name.h"
#include "foreign/foreign.h"
#include "jax/program.h"

namespace qsgd::xla {
namespace {

// Threads on which programs continue after an operation. XLA continues after an asynchronous call
// on the thread that completes it. That must not be the engine's thread. There is always an idle
// thread for a task, because the continuation may wait (in a Python callback) for another program's
// operation.
class Finishers {
 public:
  static Finishers& of_process() {
    // NOLINTNEXTLINE: never destroyed, because XLA may use its threads until the process ends
    static Finishers* const all = new Finishers;
    return *all;
  }

  void run(std::function<void()> task) {
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

 private:
  void work() {
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

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;  // threads without a task
};

using Widened = std::vector<int64_t>;

// Copies a result allocated by the core to XLA's buffer.
void copy_out(const Operand& operand, const Result& result) {
  check_rows(operand, result);
  const size_t bytes = result.output.size();
  if (const Widening* const by = operand.conversion.widening) {
    const auto* const wide = reinterpret_cast<const int64_t*>(result.output.data());
    return by->narrow(wide, bytes / sizeof(int64_t), operand.out.data);
  }
  if (bytes > 0) std::memcpy(operand.out.data, result.output.data(), bytes);
}

// A call in flight. It ends when the engine has released its memory, or with the job.
class Call {
 public:
  Call(const CallFrame& frame, std::vector<Operand> operands);
  ~Call() { end(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  std::vector<ForeignTensor> tensors(int rank);
  // From now on, only this future completes the call.
  Future* promise();
  void note(const Error* error, const Handles& handles);

 private:
  // The remaining work, on a thread on which the program may continue.
  struct Ending {
    const Api* api;
    std::vector<Operand> operands;
    std::vector<Widened> widened;  // of each operand that is widened
    Handles handles;
    std::string failure;

    void deliver();
    void operator()(Future* future);
  };

  void end();

  Future* future_ = nullptr;
  std::shared_ptr<Ending> ending_;
};

Call::Call(const CallFrame& frame, std::vector<Operand> operands)
    : ending_(std::make_shared<Ending>()) {
  ending_->api = frame.api;
  ending_->operands = std::move(operands);
  ending_->widened.resize(ending_->operands.size());
}

Future* Call::promise() {
  OfFuture made{header_of<OfFuture>(), nullptr};
  if (ending_->api->new_future(&made) != nullptr) throw internal_error("XLA gave no future");
  return future_ = made.future;
}

std::vector<ForeignTensor> Call::tensors(int rank) {
  std::vector<ForeignTensor> all;
  for (size_t i = 0; i < ending_->operands.size(); ++i) {
    const Operand& operand = ending_->operands[i];
    ForeignTensor t{operand.operation, operand.in.data, operand.out.data};
    const Operation& o = t.operation;
    if (o.kind == OpKind::kBroadcast && o.root == rank && t.in != t.out) {
      std::memcpy(t.out, t.in, o.size_bytes());  // the engine uses only `out`
    }
    if (const Widening* const by = operand.conversion.widening) {
      Widened& widened = ending_->widened[i];
      widened.resize(o.count());
      by->widen(operand.in.data, o.count(), widened.data());
      t.in = t.out = widened.data();
    }
    all.push_back(std::move(t));
  }
  return all;
}

void Call::note(const Error* error, const Handles& handles) {
  if (error == nullptr) {
    ending_->handles = handles;
    return;
  }
  ending_->failure = text_of(*error);
  // The engine never releases memory to which another rank might still write, even if the first
  // error of the call is another one.
  const auto lost = [](const std::shared_ptr<Handle>& handle) { return handle->lost(); };
  const bool any = std::any_of(handles.begin(), handles.end(), lost);
  if (any || error->kind() == ErrorKind::kRankFailed) end();
}

void Call::end() {
  Future* const future = std::exchange(future_, nullptr);
  if (future == nullptr) return;
  Finishers::of_process().run([ending = ending_, future] { (*ending)(future); });
}

void Call::Ending::deliver() {
  for (size_t i = 0; i < handles.size(); ++i) {
    const Operand& operand = operands[i];
    if (is_made_by_engine(operand)) {
      copy_out(operand, *handles[i]->result());
    } else if (const Widening* const by = operand.conversion.widening) {
      by->narrow(widened[i].data(), widened[i].size(), operand.out.data);
    }
  }
}

void Call::Ending::operator()(Future* future) {
  try {
    if (failure.empty()) deliver();
  } catch (const Error& error) {
    failure = text_of(error);
  }
  handles.clear();
  if (failure.empty()) {
    OfFuture done{header_of<OfFuture>(), future};
    api->complete_future(&done);
    return;
  }
  FailFuture failed{header_of<FailFuture>(), future, new_failure(*api, failure)};
  api->fail_future(&failed);
}

void start(CallFrame& frame) {
  const std::shared_ptr<Engine> engine = current_engine();
  const auto call = std::make_shared<Call>(frame, operands_of(frame, *engine));
  std::vector<ForeignTensor> tensors = call->tensors(engine->rank());
  frame.future = call->promise();
  start_foreign(std::move(tensors), call,
                [call](const Error* error, const Handles& handles) { call->note(error, handles); });
}

}  // namespace

Failure* collective(CallFrame* frame) {
  return answer(frame, [](CallFrame& call) {
    start(call);
    return static_cast<Failure*>(nullptr);
  });
}

}  // namespace qsgd::xla
