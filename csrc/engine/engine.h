// The engine of a process: accepts tensors in any order, agrees with the other ranks on which are
// ready everywhere, fuses and reduces them in the background, and completes handles.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/agreement.h"
#include "engine/executor.h"
#include "engine/lifeline.h"
#include "engine/step_clock.h"
#include "engine/timeline.h"
#include "engine/trials.h"
#include "transport/transport.h"

namespace qsgd {

struct EngineConfig {
  // Their functions for warnings are called from any thread of the engine, usually its own.
  Agreement::Config agreement;
  ReducerConfig reducing;
  int threads = 1;                 // for coding and reducing, including the engine's own
  std::optional<Machine> machine;  // for the planner; if empty, it is measured:
  bool measure_at_start = false;   // at the start, or when a code is first requested
  size_t kept_steps = 65536;       // number of latest steps kept for step_profile()
  std::string gpu_library;         // file of the kernels for devices; empty: none
  // Called on rank 0 with the measurements, to store them for later jobs.
  std::function<void(const Machine&)> measured;
};

struct EngineStats {
  WorkDone work;
  uint64_t wire_bytes = 0;           // provided to other ranks, control messages included
  uint64_t shared_memory_bytes = 0;  // part of it that others read from this rank's shared memory
  uint64_t control_bytes = 0;        // part of wire_bytes in control messages
  uint64_t mailed_bytes = 0;         // part of control_bytes sent through mailboxes
  uint64_t messages_heard = 0;       // control messages received
  uint64_t steps = 0;                // begun; see StepClock
  double wait_time_s = 0;            // during which a thread of the program waited for a handle
};

// Memory that an operation reads and writes. `keep`, which may own it, is released with the handle;
// see Handle. `ready` is for device memory: work that the device must finish first. When the handle
// is done, so is the device's work.
struct TensorMemory {
  const void* in = nullptr;
  void* out = nullptr;
  std::shared_ptr<void> keep;
  std::shared_ptr<gpu::Mark> ready = nullptr;
};

// How the caller of an operation waits for it.
struct Caller {
  // The caller blocks: its thread does the engine's work itself, which saves two context switches,
  // and the returned handle is usually done. If that would take long (other ranks are late, or
  // other operations must be executed), the engine's thread takes over.
  bool waits = false;
  // Polled meanwhile: whether the caller must end the job for another reason, such as a signal.
  std::function<bool()> interrupted;
};

class Engine {
 public:
  // `node` is null if the ranks of a node share no memory.
  Engine(std::unique_ptr<Transport> transport, EngineConfig config,
         std::unique_ptr<SharedNode> node = nullptr);
  ~Engine();  // without shutdown(), ends the job
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Starts an operation on memory that stays valid until the handle is done. The name may be empty
  // if ranks call in the same order. Throws a usage error if the name is in flight or check()
  // refuses the operation.
  std::shared_ptr<Handle> start(OperationPtr operation, TensorMemory memory,
                                const Caller& caller = {});
  // Returns a mark of all work submitted to a device's stream so far, for TensorMemory. Throws a
  // usage error if there are no kernels.
  std::shared_ptr<gpu::Mark> mark(int device, gpu::Stream stream) {
    return devices_.at(device).mark(stream);
  }
  // Starts several operations in order, waking the engine once. If the name of one is in flight,
  // none is started; if one is refused for another reason, those before it have been started.
  // `foreign`: the caller is a framework that waits by other means than the handles.
  std::vector<std::shared_ptr<Handle>> start_all(
      std::vector<std::pair<OperationPtr, TensorMemory>> operations, bool foreign = false);
  // Throws a usage error if this thread is executing the operation that it waits for (see Caller),
  // as in a signal handler. `call` begins the message: "shutdown() was called".
  static void check_not_driving(const char* call);

  // Returns a name for an operation without one: equal on ranks of the process set that call in the
  // same order. After a join it counts from 0 again, because a joined rank made fewer calls.
  std::string next_name(OpKind kind, int32_t set = 0);
  // How often this rank has joined; equal on all ranks when they have joined.
  uint64_t joins() const { return joins_; }

  // On rank 0: changes how later operations are executed, on all ranks alike. Throws a usage error
  // on other ranks, and for values that this job cannot use.
  void tune(const Tuning& tuning);

  // Leaves the job: pending operations that other ranks do not share fail, and the call returns
  // when every rank has left. Other ranks that still wait for this one get `reason` (UTF-8). If
  // some rank stays longer than `patience_s`, the job is ended: a rank that failed must not wait
  // for others that compute or block in other calls.
  void shutdown(const std::string& reason, double patience_s);
  // Fails all operations of this rank now; the engine is unusable afterwards.
  void abort(const std::string& message);

  // Monitors the other ranks' processes through these connections from now on.
  void watch(std::vector<Lifeline::Peer> peers, double grace_s);

  // Records the phases of every operation from now on; see Timeline.
  void start_timeline(const std::string& path, bool mark_cycles, Timeline::Clock::time_point zero) {
    timeline_->start(path, mark_cycles, zero);
  }
  void stop_timeline() { timeline_->stop(); }

  // Returns the planner's measurements. Blocks until they exist if they are made at the start.
  // Throws if the engine ended before.
  std::optional<Machine> machine();

  EngineStats stats() const;
  StepProfile step_profile() const { return steps_.profile(); }
  // Of every tensor for which compression was requested, by name; see ProcessSets.
  std::map<std::string, TensorQuality> quality() const { return sets_.quality(); }
  // Error feedback's state of a process set; see Residuals. It is empty on ranks outside of the
  // set, where it can be restored without effect. Throws a usage error while operations are in
  // flight, and if the set does not exist.
  std::map<std::string, size_t> owed_counts(int32_t set = 0);
  std::vector<float> owed_share(const std::string& name, int32_t set = 0);
  void restore_owed(std::map<std::string, std::vector<float>> owed, int32_t set = 0);
  // Deletes the residuals of tensors that are not reduced again, between two operations.
  void forget_owed(std::vector<std::string> names);
  // How often each tensor was coded, which determines its noise; equal on every rank.
  std::map<std::string, uint32_t> coded_steps();
  void restore_coded_steps(std::map<std::string, uint32_t> steps);
  // The message with which all operations fail, or nothing.
  std::string aborted() const { return abort_->message(); }
  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }

 private:
  std::shared_ptr<Handle> enter(OperationPtr operation, TensorMemory& memory, bool foreign);
  void check_fit(const Operation& operation) const;
  OperationPtr named(Operation operation);
  OperationPtr placed(OperationPtr operation, bool on_device);
  void run();
  bool make_progress();
  bool collect();
  bool submit_ready();
  bool may_stay(const Operation& operation);
  void carry_out_agreed();
  void sleep_if_idle(bool busy, std::unique_lock<std::mutex>& driving);
  void drive_until_done(const Operation& operation, Handle& handle,
                        const std::function<bool()>& interrupted);
  bool measures_at_start() const {
    return size() > 1 && (config_.machine || config_.measure_at_start);
  }
  void learn_machine();
  void end_job(const std::string& cause);
  void give_up(const std::string& message);
  void wake_all();
  void note_work(const Work& work);
  std::unique_lock<std::mutex> lock_idle();
  StepWork work_so_far() const;

  const std::unique_ptr<Transport> transport_;
  const std::shared_ptr<AbortFlag> abort_;
  const EngineConfig config_;
  const std::unique_ptr<SharedNode> node_;
  const std::unique_ptr<Workers> workers_;
  Communicator communicator_;
  const std::shared_ptr<Timeline> timeline_;
  const std::shared_ptr<WaitMeter> waits_ = std::make_shared<WaitMeter>();
  gpu::Devices devices_;  // used by any thread; declared before members that hold device memory
  Entries entries_;       // used by any thread, like the next two
  StepClock steps_;
  Trials trials_;
  std::mutex driving_;   // held by the thread that drives the engine; locked before mutex_
  Agreement agreement_;  // used by that thread only, like all members up to mutex_
  ProcessSets sets_;
  Operations& everyone_;  // of set 0
  Executor executor_;
  std::vector<Submission> late_;  // tensors that a device still computes
  Backoff backoff_;
  std::optional<std::chrono::steady_clock::time_point> idle_since_;  // if its sleeps are short

  // Submissions of the program's threads.
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<Submission> fresh_;
  std::vector<Submission> collected_;  // used by the driving thread; kept to reuse its memory
  std::atomic<bool> news_{false};      // whether there is anything to collect
  Tuning tuning_;
  std::vector<std::string> forgotten_;  // names whose residuals are to be deleted
  bool leaving_ = false;
  bool ended_ = false;  // the engine's thread has finished
  std::string reason_;
  std::atomic<uint64_t> joins_{0};
  // Counters for operations without a name since the last join, by kind and process set.
  std::map<std::pair<OpKind, int32_t>, uint64_t> numbers_;
  std::unordered_map<OperationPtr, OperationPtr> placed_;

  std::unique_ptr<Lifeline> lifeline_;
  std::thread thread_;  // last: it uses all members above
};

}  // namespace qsgd
