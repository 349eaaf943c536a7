// How the ranks agree on what to carry out next: each tells rank 0 which operations it is ready
// for, and rank 0 tells all of them what every rank of a set is ready for, in one order.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/books.h"
#include "engine/coordinator.h"
#include "engine/entries.h"
#include "engine/messenger.h"
#include "engine/timeline.h"

namespace qsgd {

// Used by one thread at a time, but for bytes_sent().
class Agreement {
 public:
  struct Config {
    Tuning tuning;
    Planning planning = Planning::kOff;
    size_t cache_capacity = 1024;  // names that travel as numbers; at most kMaxBook do
    double stall_warning_s = 60;   // 0: never
    double stall_shutdown_s = 0;   // ends the job then; 0: never
    double deadlock_s = 10;        // ranks that have waited so long for one another fail; 0: never
    std::function<void(const std::string&)> log;
    std::function<void(const std::string&)> give_up;  // the job, on all ranks
  };

  // `node` is null where the ranks of a node share no memory.
  Agreement(Transport& transport, SharedNode* node, Timeline& timeline, Config config);

  // This rank is ready for these.
  void submit(std::vector<Submission>& submissions);
  // And for nothing more.
  void leave(const std::string& reason);
  bool has_left() const { return left_; }
  // Hears the others, and on rank 0 answers them. True if anything happened.
  bool make_progress();
  // Looks, now and then, for ranks that wait for too long; `entries` are what this rank waits for.
  void watch_waits(const Entries& entries);
  // Returns when all that was said has left this rank.
  void flush() { messenger_.flush(); }

  // What this rank is to carry out next, and then, if so, to measure the machine.
  const std::vector<Response>& agreed() const { return agreed_; }
  std::vector<Response> take_agreed() { return std::exchange(agreed_, {}); }
  bool measures_next() const { return measures_next_; }
  bool take_measures_next() { return std::exchange(measures_next_, false); }
  bool is_over() const { return over_; }  // every rank has left
  // Whether others may have something to say while this rank is ready for nothing; and if not,
  // whether they may have soon.
  bool must_listen() const { return left_ || (is_first() && coordinator_.watches_others()); }
  bool has_sets_of_others() const { return coordinator_.has_sets_of_others(); }

  // On rank 0:
  void tune(const Tuning& tuning) { coordinator_.tune(tuning); }
  void know_machine(const Machine& machine, const PlanRequest& request, Workers* workers) {
    coordinator_.know_machine(machine, request, workers);
  }

  BytesGiven bytes_sent() const { return messenger_.bytes_sent(); }

 private:
  int rank() const { return transport_.rank(); }
  int size() const { return transport_.size(); }
  bool is_first() const { return rank() == 0; }
  void receive(int rank, Submission submission);
  void on_message(int peer, FrameType type, Reader body);
  void read_responses(Reader& body);
  void answer();
  void send_out(const std::vector<Response>& responses);
  void send_to_all(FrameType type);
  void report_own_waits(const Entries& entries);
  void note_arrival(int rank, const Operation& operation);
  void note_agreement(const std::vector<Response>& responses);

  Transport& transport_;
  Timeline& timeline_;
  const Config config_;
  Coordinator coordinator_;  // used on rank 0
  Messenger messenger_;
  SentBook sent_;
  std::vector<HeardBook> heard_;  // on rank 0, by rank
  NameBook names_;
  std::vector<Response> agreed_;
  bool measures_next_ = false;
  bool left_ = false;
  bool over_ = false;
  Coordinator::Clock::time_point last_watch_ = Coordinator::Clock::now();
  Coordinator::Clock::time_point last_submission_ = Coordinator::Clock::now();
  std::vector<Key> told_waits_;  // what rank 0 knows that the program here waits for
  // Kept for their memory.
  std::vector<Writer> answers_;  // by rank
  Writer answer_;
};

}  // namespace qsgd
