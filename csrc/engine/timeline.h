// Phases of every tensor over time, for viewers: one row per tensor (format: trace_writer.h). Costs
// one branch if off.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "engine/trace_writer.h"

namespace qsgd {

class Timeline {
 public:
  using Clock = TraceWriter::Clock;

  // An executed operation.
  struct Work {
    std::string tensor;
    std::string operation;  // "allreduce"
    Clock::time_point begin;
    std::string algorithm;         // empty if the operation has only one
    Clock::time_point exchange{};  // time of the algorithm
    Clock::time_point exchange_end{};
    uint64_t wire_bytes = 0;  // share of the bytes that this rank sent for all fused tensors
    uint64_t elements = 0;
    double bits = 0;  // per element on the wire
    double nmse = 0;
    double coding_s = 0;  // share of the reduction's coding time
    uint64_t fused = 1;
    uint64_t process_set = 0;
    std::string error = {};
  };

  explicit Timeline(int rank) : rank_(rank) {}

  // Name of a tensor's row: names are unique only within a process set.
  static std::string row_of(int32_t set, const std::string& name) {
    return set == 0 ? name : name + " (process set " + std::to_string(set) + ")";
  }

  // Writes to `path` until stop(); times are relative to `zero`. Throws a usage error if a timeline
  // is being written already, or the file cannot be created.
  void start(const std::string& path, bool mark_cycles, Clock::time_point zero);
  void stop();
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // The functions below do nothing while off; callers check on() first, to save the arguments.

  // `rank` is ready for the tensor; the first rank begins the negotiation.
  void arrived(const std::string& tensor, const std::string& operation, int rank);
  // All ranks are ready, and it waits for earlier ones; or it failed with `error`.
  void agreed(const std::string& tensor, const std::string& error);
  void done(const Work& work);
  // The program has waited for a result since then.
  void waited(Clock::time_point since);
  // A training step is complete, as defined by StepClock.
  void stepped(uint64_t step, Clock::time_point begin, Clock::time_point end);
  // The ranks have agreed on the next operations.
  void cycle();

 private:
  struct Row {
    uint32_t number;
    std::string negotiation;  // current; empty: none
    Clock::time_point agreed{};
  };
  Row& row(const std::string& tensor);
  void name_row(uint32_t number, const std::string& name);

  const int rank_;
  std::atomic<bool> on_{false};
  std::mutex mutex_;  // guards what follows
  std::unique_ptr<TraceWriter> writer_;
  bool mark_cycles_ = false;
  Clock::time_point zero_;
  std::unordered_map<std::string, Row> rows_;
};

}  // namespace qsgd
