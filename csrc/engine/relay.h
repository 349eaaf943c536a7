// What a rank below rank 0 does with what it and those below it are ready for: says it once for all
// of them, when all are. No messages: submissions in, reports out.
//
// Rank 0 alone judges. What is not the same everywhere, or will not become whole, is passed on as
// it came, with its ranks, so that rank 0 finds who is missing and what differs as if each rank had
// told it itself; and so is what rank 0 asks for, and everything while a rank from here has joined
// or any has left.
#pragma once

#include <chrono>
#include <map>
#include <utility>
#include <vector>

#include "common/coarse_clock.h"
#include "engine/books.h"
#include "engine/group_tally.h"
#include "engine/response.h"
#include "engine/tree.h"

namespace qsgd {

// For the parent: that some ranks are ready for these.
struct Report {
  RankSet ranks;
  bool whole = false;  // they are all of the sender's and below that are in the operations' set
  std::vector<Submission> submissions;
};

class Relay {
 public:
  using Clock = CoarseClock;

  // Passes on what has not become whole after `patience`, whatever else happens.
  Relay(const Tree& tree, Clock::duration patience);

  void submit(const RankSet& ranks, Submission submission);
  // `rank` submits nothing any more.
  void leave(int rank);
  bool all_left() const { return left_ == tree_.ours(); }
  // `rank` says that it does nothing but wait.
  void block(int rank);
  // Rank 0 wants to know who is ready for these; or, for good, for everything.
  void tell(const std::vector<Key>& keys);
  void tell_all();
  // Passes on what has waited for too long.
  void watch();
  bool has_reports() const { return !reports_.empty(); }
  // What to tell the parent, in this order.
  std::vector<Report> take_reports() { return std::exchange(reports_, {}); }
  // Rank 0 has answered: a process set may have come or gone, and names are free again.
  void note(const Response& response);

  // Null where there is no such set.
  Members members(int32_t set) const;
  // Whether anything waits that this rank takes no part in, or such may come.
  bool watches_others() const { return others_ > 0; }
  bool has_sets_of_others() const;

 private:
  struct Entry {
    OperationPtr operation;  // of the first that came; null where rank 0 asked before
    RankSet ranks;           // that are ready
    double nmse = 0;
    std::map<int, int64_t> rows;  // of an allgather, by rank
    int last = -1;                // rank to come
    Clock::time_point since;
    // Of those that are ready the parent knows; whoever comes is passed on at once.
    bool open = false;
    bool told = false;  // so it does of all; kept where this rank must listen for the answer
  };
  using Table = std::map<Key, Entry>;
  struct Set {
    Members members;
    RankSet ours;
    bool is_of_others = false;
  };

  bool is_apart() const { return apart_ || !joined_.empty() || !left_.empty(); }
  void settle(const GroupKey& key, const RankSet& ours);
  static Submission combined(const Entry& entry);
  void begin(Entry& entry, const OperationPtr& operation);
  void open(Entry& entry);
  void open_all();
  void end(Table::iterator it);
  void pass(const RankSet& ranks, bool whole, Submission submission);
  void add_set(int32_t id, Members members);

  const Tree& tree_;
  const Clock::duration patience_;
  std::map<int32_t, Set> sets_;
  Table entries_;
  int others_ = 0;  // entries of sets without this rank
  RankSet joined_, left_, blocked_;
  bool apart_ = false;
  GroupTally groups_;
  Clock::time_point last_look_ = Clock::now();
  std::vector<Report> reports_;
};

}  // namespace qsgd
