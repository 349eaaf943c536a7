// Does on this rank what rank 0 answers, and ends the operations' handles.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/entries.h"
#include "engine/process_sets.h"
#include "engine/response.h"
#include "engine/staging.h"

namespace qsgd {

struct WorkDone {
  uint64_t gradient_bytes = 0;  // handed to allreduce
  uint64_t allreduces = 0;      // tensors
  uint64_t fused = 0;           // reductions that carried them
  double comm_time_s = 0;       // spent in collectives
  double coding_time_s = 0;     // of it, on codes: making them, adding and decoding
};

// For the timeline: what a response came to on this rank.
struct Work {
  const Response& response;
  const std::vector<Entry*>& entries;
  const std::vector<Outcome>& outcomes;
  std::chrono::steady_clock::time_point start;
  uint64_t wire_bytes;
};

// Used by the thread that drives the engine, but for done().
class Executor {
 public:
  using Note = std::function<void(const Work&)>;

  // `note` is called after each collective.
  Executor(Communicator communicator, Entries& entries, ProcessSets& sets,
           std::shared_ptr<AbortFlag> abort, Note note)
      : communicator_(communicator),
        entries_(entries),
        sets_(sets),
        abort_(std::move(abort)),
        note_(std::move(note)) {}

  // In their order; throws when the job is aborted. Failures that follow one another end together:
  // a program that heard of the first alone could submit again in time for the next.
  void carry_out(const std::vector<Response>& responses);
  // Ends operations whose results have come to their device since. True while others have not.
  bool end_landed();
  WorkDone done() const;

 private:
  void carry_out(const Response& response);
  std::vector<Outcome> work(const Response& response);
  void change_sets(const Operation& operation, int64_t id);
  void settle_held(bool grouped);
  void end_settled();
  void count(const std::vector<Entry*>& entries, double seconds, double coding_s);

  Communicator communicator_;
  Entries& entries_;
  ProcessSets& sets_;
  const std::shared_ptr<AbortFlag> abort_;
  const Note note_;
  std::vector<Ended> held_;     // of a group that goes on
  std::vector<Ended> settled_;  // to end next
  // Copies to devices of what is settled, and operations that end once theirs have landed, while
  // others are carried out.
  std::vector<std::shared_ptr<Staging>> landing_;
  std::deque<std::pair<std::vector<std::shared_ptr<Staging>>, std::vector<Ended>>> in_flight_;
  mutable std::mutex mutex_;  // guards done_
  WorkDone done_;
};

}  // namespace qsgd
