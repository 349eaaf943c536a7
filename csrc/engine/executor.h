// Executes rank 0's responses on this rank, and completes the handles.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/entries.h"
#include "engine/process_sets.h"
#include "engine/response.h"
#include "engine/staging.h"

namespace qsgd {

struct WorkDone {
  uint64_t gradient_bytes = 0;  // submitted to allreduce
  uint64_t allreduces = 0;      // tensors
  uint64_t fused = 0;           // reductions that contained these tensors
  double comm_time_s = 0;       // spent in collectives
  double coding_time_s = 0;     // part of comm_time_s: encoding, summing and decoding
};

// A response as executed on this rank, for the timeline.
struct Work {
  const Response& response;
  const std::vector<Entry*>& entries;
  const std::vector<Outcome>& outcomes;
  std::chrono::steady_clock::time_point start;
  uint64_t wire_bytes;
};

// Used by the thread that drives the engine, except done().
class Executor {
 public:
  using Note = std::function<void(const Work&)>;

  // `note` is called after each collective.
  Executor(const Communicator& communicator, Entries& entries, ProcessSets& sets, Note note)
      : communicator_(communicator), entries_(entries), sets_(sets), note_(std::move(note)) {}

  // Executes the responses in order; throws if the job is aborted. Consecutive failures complete
  // together: after seeing only the first, a program could submit again before the next one, which
  // would then fail the new operation.
  void carry_out(const std::vector<Response>& responses);
  // Completes operations whose results have arrived on their device. Returns true while others are
  // pending.
  bool end_landed();
  bool is_landing() const { return !in_flight_.empty(); }
  WorkDone done() const;

 private:
  void carry_out(const Response& response);
  std::vector<Outcome> work(const Response& response);
  void change_sets(const Operation& operation, int64_t id);
  void finish_held(bool grouped);
  void end_finished();
  void count(const std::vector<Entry*>& entries, double seconds, double coding_s);

  const Communicator communicator_;
  Entries& entries_;
  ProcessSets& sets_;
  const Note note_;
  std::vector<Ended> held_;      // of a group with more responses to come
  std::vector<Ended> finished_;  // to be completed next
  // Copies of results to devices; and operations that complete when their copies have finished,
  // while other responses are executed.
  std::vector<std::shared_ptr<Staging>> landing_;
  std::deque<std::pair<std::vector<std::shared_ptr<Staging>>, std::vector<Ended>>> in_flight_;
  mutable std::mutex mutex_;  // guards done_
  WorkDone done_;
};

}  // namespace qsgd
