// What happened to every tensor and when, for a person to look at: a row per tensor with the
// engine's phases (trace_writer.h has the format). Costs one branch where it is off.
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

  // One operation that was carried out.
  struct Work {
    std::string tensor;
    std::string operation;  // "allreduce"
    Clock::time_point begin;
    std::string algorithm;         // empty: the operation has but one
    Clock::time_point exchange{};  // what of it the algorithm took
    Clock::time_point exchange_end{};
    uint64_t wire_bytes = 0;  // its share of what this rank handed over for all that were fused
    uint64_t elements = 0;
    double bits = 0;  // per element on the wire
    double nmse = 0;
    double coding_s = 0;  // its share of what the reduction spent coding and decoding
    uint64_t fused = 1;
    uint64_t process_set = 0;
    std::string error = {};
  };

  explicit Timeline(int rank) : rank_(rank) {}

  // What a tensor is called here: process sets have names of their own.
  static std::string row_of(int32_t set, const std::string& name) {
    return set == 0 ? name : name + " (process set " + std::to_string(set) + ")";
  }

  // Writes to `path` until stop(); times count from `zero`. Throws a usage error when one is being
  // written already, or the file cannot be.
  void start(const std::string& path, bool mark_cycles, Clock::time_point zero);
  void stop();
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // What follows does nothing while off; callers ask on() first, to save the arguments.

  // `rank` has the tensor ready since `at`; the first one begins the negotiation.
  void arrived(const std::string& tensor, const std::string& operation, int rank,
               Clock::time_point at);
  // All ranks have it, and it waits for those before it; or it is never carried out, for `error`.
  void agreed(const std::string& tensor, const std::string& error);
  void done(const Work& work);
  // The program waited for a result until now.
  void waited(Clock::time_point since);
  // A training step is over, as StepClock sees them.
  void stepped(uint64_t step, Clock::time_point begin, Clock::time_point end);
  // The ranks have agreed on what to do next.
  void cycle();

 private:
  struct Row {
    uint32_t number;
    std::string negotiation;  // under way; empty: none
    Clock::time_point agreed{};
  };
  Row& row(const std::string& tensor);

  const int rank_;
  std::atomic<bool> on_{false};
  std::mutex mutex_;  // guards what follows
  std::unique_ptr<TraceWriter> writer_;
  bool mark_cycles_ = false;
  Clock::time_point zero_;
  std::unordered_map<std::string, Row> rows_;
};

}  // namespace qsgd
