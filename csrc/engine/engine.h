// The one engine of a process: takes tensors in any order, agrees with the other ranks on what is
// ready everywhere, fuses, reduces in the background, and completes handles.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/coordinator.h"
#include "engine/handle.h"
#include "engine/lifeline.h"
#include "engine/messenger.h"
#include "engine/submission.h"
#include "transport/transport.h"

namespace qsgd {

enum class NonFinite { kError, kWarn, kPropagate };

struct EngineConfig {
  uint64_t seed = 0;
  size_t fusion_bytes = size_t{64} << 20;
  NonFinite nonfinite = NonFinite::kError;
  double stall_warning_s = 60;                  // 0: never
  std::function<void(const std::string&)> log;  // warnings; called from the engine's thread
};

struct EngineStats {
  uint64_t wire_bytes = 0;      // this rank sent, control messages included
  uint64_t gradient_bytes = 0;  // handed to allreduce
  uint64_t allreduces = 0;      // tensors
  uint64_t fused = 0;           // reductions that carried them
  double comm_time_s = 0;       // the engine's thread spent in collectives
};

class Engine {
 public:
  Engine(std::unique_ptr<Transport> transport, std::shared_ptr<AbortFlag> abort,
         EngineConfig config);
  ~Engine();  // without shutdown(): gives the job up
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // `in` and `out` stay valid until the handle is done; a broadcast works on `out` alone.
  // Throws a usage error for a name in flight, a bad root, or a coding the type cannot have.
  std::shared_ptr<Handle> submit(Submission submission, const void* in, void* out);

  // Leaves the job: pending operations that other ranks do not share fail, and the call returns
  // when every rank has left. `reason` (UTF-8) is what others read if they still wait for this
  // rank. If some rank stays longer than `patience_s`, the job is given up: that is for a rank
  // that failed while others compute or sit in a call of their own.
  void shutdown(const std::string& reason, double patience_s);
  // Fails everything now, on this rank; the engine is unusable afterwards.
  void abort(const std::string& message);

  // Watches the other ranks' processes through these connections from now on.
  void watch(std::vector<Lifeline::Peer> peers, double grace_s);

  EngineStats stats() const;
  // The message everything fails with, or nothing.
  std::string aborted() const { return abort_->message(); }
  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }

 private:
  struct Entry {
    Submission submission;
    const void* in;
    void* out;
    std::shared_ptr<Handle> handle;
  };

  void run();
  bool turn();
  void rest(bool busy);
  void hand_in(std::vector<Submission> fresh, bool leaving);
  void on_frame(int peer, FrameType type, Reader body);
  void answer();
  void carry_out(const Response& response);
  void reduce(std::vector<Entry*>& entries);
  std::vector<std::string> find_nonfinite(const std::vector<Entry*>& entries,
                                          const std::vector<ReduceTensor>& tensors);
  void complete(const std::string& name, ErrorKind kind, const std::string& message);
  void give_up(const std::string& message);
  void fail_all(const std::string& message);
  void warn_of_stalls();

  const std::unique_ptr<Transport> transport_;
  const std::shared_ptr<AbortFlag> abort_;
  const EngineConfig config_;
  Coordinator coordinator_;                // used on rank 0
  Messenger messenger_;                    // used by the thread alone, as is the rest up to mutex_
  std::map<std::string, uint32_t> steps_;  // how often a name was quantised
  Backoff backoff_;
  bool left_ = false;
  bool finished_ = false;
  Coordinator::Clock::time_point last_stall_check_ = Coordinator::Clock::now();

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<std::string, Entry> entries_;
  std::vector<Submission> fresh_;
  bool leaving_ = false;
  bool ended_ = false;  // the thread does nothing more
  std::string reason_;
  EngineStats stats_;

  std::unique_ptr<Lifeline> lifeline_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace qsgd
