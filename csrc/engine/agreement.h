// Agreement between the ranks on what to execute next: rank 0 receives which operations each rank
// is ready for, and sends to all the operations that every rank of a set is ready for, in one
// order. These messages travel along a tree: a relay reports once when its subtree is ready, and
// forwards the responses.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/books.h"
#include "engine/coordinator.h"
#include "engine/entries.h"
#include "engine/messenger.h"
#include "engine/relay.h"
#include "engine/timeline.h"

namespace qsgd {

// Used by one thread at a time, except bytes_sent() and messages_heard().
class Agreement {
 public:
  struct Config {
    Tuning tuning{size_t{64} << 20, 0.0, Algorithm::kAuto, std::nullopt, SegmentSize()};
    Planning planning = Planning::kOff;
    size_t cache_capacity = 1024;  // names sent as numbers; at most kMaxBook
    double stall_warning_s = 60;   // 0: never
    double stall_shutdown_s = 0;   // ends the job; 0: never
    double deadlock_s = 10;        // ranks that wait for each other this long fail; 0: never
    int fan_out = 0;               // of the tree between nodes; see Tree
    std::function<void(const std::string&)> log;
  };

  // `node` is null if the ranks of a node share no memory. `give_up` ends the job on all ranks;
  // called if there is a stall_shutdown_s. `sums_in_nodes`: see Coordinator.
  Agreement(Transport& transport, SharedNode* node, Timeline& timeline, Config config,
            std::function<void(const std::string&)> give_up = nullptr,
            std::function<bool()> sums_in_nodes = nullptr);

  // Reports that this rank is ready for these operations.
  void submit(std::vector<Submission>& submissions);
  // Reports that this rank will submit nothing more.
  void leave(const std::string& reason);
  bool has_left() const { return left_; }
  // Receives messages and answers or forwards them. Returns true if anything happened. Does nothing
  // until the agreed operations have been executed: other ranks may already execute them, and
  // messages sent meanwhile might not leave this rank before it takes part.
  bool make_progress();
  // Checks periodically for ranks that wait too long; `entries` are the pending operations of this
  // rank, `submits_more` returns whether the program has started any that were not submitted yet.
  void watch_waits(const Entries& entries, const std::function<bool()>& submits_more);
  // Blocks until MPI has accepted all messages of this rank.
  void flush() { messenger_.flush(); }

  // The operations that this rank must execute next, and whether it must then measure the machine.
  const std::vector<Response>& agreed() const { return agreed_; }
  std::vector<Response> take_agreed() { return std::exchange(agreed_, {}); }
  bool measures_next() const { return measures_next_; }
  bool take_measures_next() { return std::exchange(measures_next_, false); }
  bool is_over() const { return over_; }  // every rank has left
  // Whether messages may arrive although this rank has nothing pending; has_sets_of_others():
  // whether that may become so soon.
  bool must_poll() const {
    return left_ || coordinator_.watches_others() || relay_.watches_others() ||
           relay_.has_reports();
  }
  bool has_sets_of_others() const {
    return is_root() ? coordinator_.has_sets_of_others() : relay_.has_sets_of_others();
  }
  // Whether this rank has children, whose messages it must check for even when idle.
  bool has_children() const { return !tree_.children().empty(); }
  // Whether sleeping on this rank delays messages between other ranks.
  bool is_intermediate() const { return tree_.is_intermediate(); }

  // On rank 0:
  void tune(const Tuning& tuning) { coordinator_.tune(tuning); }
  void set_machine(const Machine& machine, const PlanRequest& request, Workers* workers) {
    coordinator_.set_machine(machine, request, workers);
  }

  BytesGiven bytes_sent() const { return messenger_.bytes_sent(); }
  uint64_t messages_heard() const { return messenger_.messages_received(); }

 private:
  int rank() const { return transport_.rank(); }
  int size() const { return transport_.size(); }
  bool is_root() const { return rank() == 0; }
  void receive(const RankSet& ranks, Submission submission);
  void receive_whole(int child, Submission submission);
  void on_message(int child, FrameType type, Reader body);
  void on_leave(int rank, const std::string& reason);
  void on_blocked(int rank, std::vector<Key> waits_for);
  void read_responses(Reader& body);
  void answer();
  void address(const Members& recipients, const char* bytes, size_t size);
  void send_addressed();
  void send_to_relays(FrameType type, const std::vector<char>& body);
  void send_down(FrameType type, bool last = false);
  void measure_next();
  void say_farewell();
  void query(const std::vector<Key>& keys);
  bool may_report() const;
  void send_reports();
  void ask_for_late();
  void report_own_waits(const Entries& entries, const std::function<bool()>& submits_more);
  void note_arrival(const RankSet& ranks, const Submission& submission);
  void note_agreement(const std::vector<Response>& responses);

  Transport& transport_;
  Timeline& timeline_;
  const Config config_;
  const std::function<void(const std::string&)> give_up_;
  const Tree tree_;
  const RankSet self_;
  Coordinator coordinator_;  // used on rank 0
  Relay relay_;              // on the others
  Messenger messenger_;
  SentBook sent_;
  std::shared_ptr<OperationPool> pool_ = std::make_shared<OperationPool>();
  std::vector<ReceivedBook> received_;  // by child
  NameBook names_;
  std::vector<Response> agreed_;
  bool measures_next_ = false;
  bool asked_unmerged_ = false;  // on rank 0: every report is requested unmerged
  std::chrono::steady_clock::time_point reported_at_;  // last report to the parent
  bool answered_ = true;                               // a response has arrived since
  bool left_ = false;
  bool over_ = false;
  Coordinator::Clock::time_point last_watch_ = Coordinator::Clock::now();
  Coordinator::Clock::time_point last_submission_ = Coordinator::Clock::now();
  std::vector<Key> reported_waits_;  // the last waits reported to rank 0
  // Members only to reuse their memory:
  std::vector<Writer> answers_;  // by child
  Writer answer_;
};

}  // namespace qsgd
