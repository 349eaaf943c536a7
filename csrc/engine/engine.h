// The one engine of a process: takes tensors in any order, agrees with the other ranks on what is
// ready everywhere, fuses, reduces in the background, and completes handles.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
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
  uint64_t seed = 0;
  size_t fusion_bytes = size_t{64} << 20;
  NonFinite nonfinite = NonFinite::kError;
  Algorithm algorithm = Algorithm::kAuto;
  SegmentSize segment;
  int threads = 1;  // that code and reduce, the engine's own among them
  Planning planning = Planning::kOff;
  std::optional<Machine> machine;  // what the planner goes by; measured where nothing is given,
  bool measure_at_start = false;   // at once, or when a code is first asked for
  size_t cache_capacity = 1024;    // names that travel as numbers; at most kMaxBook do
  double cycle_time_s = 0;         // rank 0 waits so long for more tensors to fuse
  double stall_warning_s = 60;     // 0: never
  double stall_shutdown_s = 0;     // ends the job then; 0: never
  double deadlock_s = 10;          // ranks that have waited so long for one another fail; 0: never
  int fan_out = 0;                 // of the tree in which ranks agree, between nodes; see there
  size_t kept_steps = 65536;       // whose figures step_profile() has, the latest
  std::string gpu_library;         // file of the kernels for tensors on devices; empty: none
  std::string nccl_library;        // what carries those that are not coded; empty: the host does
  // Warnings; called from whichever thread is at work here, mostly the engine's own.
  std::function<void(const std::string&)> log;
  // On rank 0: what was measured, for the next job.
  std::function<void(const Machine&)> measured;
};

struct EngineStats {
  WorkDone work;
  uint64_t wire_bytes = 0;           // this rank handed to others, control messages included
  uint64_t shared_memory_bytes = 0;  // those of them that others read in memory it shares
  uint64_t control_bytes = 0;        // those of them that only told what to do
  uint64_t mailed_bytes = 0;         // those of these that went through memory
  uint64_t messages_heard = 0;       // of control
  uint64_t steps = 0;                // begun; see StepClock
  double wait_time_s = 0;            // in which a thread of the program waited for a handle
};

// Where an operation reads and writes. `keep`, which may see to its staying valid, is let go with
// the handle; see there. `ready` is for a device's memory: what the device must have done first.
// When the handle is done, so is the device's work.
struct TensorMemory {
  const void* in = nullptr;
  void* out = nullptr;
  std::shared_ptr<void> keep;
  std::shared_ptr<gpu::Mark> ready = nullptr;
};

// Who starts an operation.
struct Caller {
  // Has nothing to do but wait: it does the engine's work itself, which saves two changes of
  // thread, and the handle that comes back is done. Where that would take it long (others are late,
  // much else is under way) the engine's thread goes on with it.
  bool waits = false;
  // Asked now and then, meanwhile, whether the caller must end the job for something else.
  std::function<bool()> interrupted;
  // A framework, which waits by itself and not with the handle.
  bool foreign = false;
};

class Engine {
 public:
  // `node` is null where the ranks of a node share no memory.
  Engine(std::unique_ptr<Transport> transport, std::shared_ptr<AbortFlag> abort,
         EngineConfig config, std::unique_ptr<SharedNode> node = nullptr);
  ~Engine();  // without shutdown(): gives the job up
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Starts an operation on memory that stays valid until the handle is done. Ranks that call
  // in one order may leave its name out. Throws a usage error for a name in flight, and for what
  // check() refuses.
  std::shared_ptr<Handle> start(OperationPtr operation, TensorMemory memory,
                                const Caller& caller = {});
  // Marks what a device's stream has been given by now, for TensorMemory. Throws a usage error
  // where there are no kernels.
  std::shared_ptr<gpu::Mark> mark(int device, gpu::Stream stream) {
    return devices_.at(device).mark(stream);
  }
  // Several at once, in their order; the engine is woken once for all. Where one is refused, those
  // before it have been started.
  std::vector<std::shared_ptr<Handle>> start_all(
      std::vector<std::pair<OperationPtr, TensorMemory>> operations);
  // Throws a usage error where this thread carries out what it waits for (see Caller), as a handler
  // of signals may find it. `call` says what it did: "shutdown() was called".
  static void check_not_driving(const char* call);

  // A name for an operation without one, equal on ranks of the process set that call in one order.
  std::string next_name(OpKind kind, int32_t set = 0);

  // On rank 0: changes how later operations are carried out, on all ranks alike. Throws a usage
  // error on other ranks, and for what cannot be carried out here.
  void tune(const Tuning& tuning);

  // Leaves the job: pending operations that other ranks do not share fail, and the call returns
  // when every rank has left. `reason` (UTF-8) is what others read if they still wait for this
  // rank. If some rank stays longer than `patience_s`, the job is given up: that is for a rank
  // that failed while others compute or sit in a call of their own.
  void shutdown(const std::string& reason, double patience_s);
  // Fails everything now, on this rank; the engine is unusable afterwards.
  void abort(const std::string& message);

  // Watches the other ranks' processes through these connections from now on.
  void watch(std::vector<Lifeline::Peer> peers, double grace_s);

  // Writes what happens to every tensor from now on; see Timeline.
  void start_timeline(const std::string& path, bool mark_cycles, Timeline::Clock::time_point zero) {
    timeline_->start(path, mark_cycles, zero);
  }
  void stop_timeline() { timeline_->stop(); }

  // What the planner goes by, once it is known. Waits where that is from the start on. Throws when
  // the engine ended before.
  std::optional<Machine> machine();

  EngineStats stats() const;
  StepProfile step_profile() const { return steps_.profile(); }
  // Of every tensor for which compression was asked, by name.
  std::map<std::string, TensorQuality> quality() const {
    return everyone_.reducer().quality().all();
  }
  // What error feedback owes; see Residuals. Throws a usage error while operations are under way.
  std::map<std::string, size_t> owed_counts();
  std::vector<float> owed_share(const std::string& name);
  void restore_owed(std::map<std::string, std::vector<float>> owed);
  // How often each tensor was coded, on which the noise depends; the same on every rank.
  std::map<std::string, uint32_t> coded_steps();
  void restore_coded_steps(std::map<std::string, uint32_t> steps);
  // The message everything fails with, or nothing.
  std::string aborted() const { return abort_->message(); }
  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }

 private:
  std::shared_ptr<Handle> enter(OperationPtr operation, TensorMemory memory, bool foreign);
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
  const std::shared_ptr<Timeline> timeline_;
  const std::shared_ptr<WaitMeter> waits_ = std::make_shared<WaitMeter>();
  gpu::Devices devices_;  // any thread's; before what holds memory of theirs
  Entries entries_;       // any thread's, as are the next two
  StepClock steps_;
  Trials trials_;
  std::mutex driving_;   // held by the thread that drives the engine; locked before mutex_
  Agreement agreement_;  // its alone, as is the rest up to mutex_
  Communicator communicator_;
  ProcessSets sets_;
  Operations& everyone_;  // of set 0
  Executor executor_;
  std::vector<Submission> late_;  // of tensors that a device still works on
  Backoff backoff_;
  std::optional<std::chrono::steady_clock::time_point> idle_since_;  // where its naps are short

  // What threads of the program have handed in.
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<Submission> fresh_;
  std::vector<Submission> collected_;  // the driving thread's; kept for its memory
  std::atomic<bool> news_{false};      // whether there is anything to collect
  Tuning tuning_;
  bool leaving_ = false;
  bool ended_ = false;  // the thread does nothing more
  std::string reason_;
  // Of operations without a name of the caller's, by process set.
  std::map<std::pair<OpKind, int32_t>, uint64_t> numbers_;
  std::unordered_map<OperationPtr, OperationPtr> placed_;

  std::unique_ptr<Lifeline> lifeline_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace qsgd
