// Merging of reports on a rank other than 0: an operation is reported once for the complete
// subtree, when all its ranks are ready. Sends no messages: submissions in, reports out.
//
// Only rank 0 diagnoses faults. Operations that differ between ranks, or will not become complete,
// are therefore forwarded unmerged, with their ranks, so that rank 0 finds missing ranks and
// differences as if each rank had reported directly. The same holds for operations that rank 0 asks
// for, and for everything while a rank of the subtree has joined or any rank has left.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "common/coarse_clock.h"
#include "engine/books.h"
#include "engine/group_tally.h"
#include "engine/response.h"
#include "engine/tree.h"

namespace qsgd {

// A message to the parent: some ranks are ready for these operations.
struct Report {
  RankSet ranks;
  bool whole = false;  // all ranks of the sender's subtree that belong to the operations' set
  std::vector<Submission> submissions;
};

class Relay {
 public:
  using Clock = CoarseClock;

  // An operation that is incomplete after `patience` is forwarded in any case.
  Relay(const Tree& tree, Clock::duration patience);

  void submit(const RankSet& ranks, Submission submission);
  // `rank` submits nothing more.
  void leave(int rank);
  bool all_left() const { return left_ == tree_.ours(); }
  // `rank` reports that it does nothing but wait.
  void block(int rank);
  // Rank 0 asks which ranks are ready for these; the second function: for all, permanently.
  void report_unmerged(const std::vector<Key>& keys);
  void report_all_unmerged();
  // Forwards operations that have waited for too long.
  void watch();
  bool has_reports() const { return !reports_.empty(); }
  // The reports for the parent, in order.
  std::vector<Report> take_reports() { return std::exchange(reports_, {}); }
  // Handles a response of rank 0: process sets may have been added or removed, and names are free
  // again.
  void note(const Response& response);

  // Null if there is no such set.
  Members members(int32_t set) const;
  // Whether operations of sets without this rank are pending; has_sets_of_others(): may become so.
  bool watches_others() const { return others_ > 0; }
  bool has_sets_of_others() const;

 private:
  struct Entry {
    OperationPtr operation;  // of the first rank; null if rank 0 asked before
    RankSet ranks;           // ranks that are ready
    double nmse = 0;
    std::map<int, int64_t> rows;  // of an allgather, by rank
    int last = -1;                // the last rank
    Clock::time_point since;
    // The parent has the ranks so far, and later ones are forwarded immediately.
    bool open = false;
    bool reported = false;  // the parent has all; kept if this rank must wait for the response
  };
  using Table = std::map<Key, Entry>;
  struct Set {
    Members members;
    RankSet ours;
    bool is_of_others = false;
  };

  bool is_unmerged() const { return unmerged_ || !joined_.empty() || !left_.empty(); }
  void open_group(const GroupKey& key, const RankSet& ours);
  static Submission combined(const Entry& entry);
  void open(Entry& entry);
  void open_all();
  void end(Table::iterator it);
  void add_report(const RankSet& ranks, bool whole, Submission submission);
  void add_set(int32_t id, Members members);

  const Tree& tree_;
  const Clock::duration patience_;
  std::map<int32_t, Set> sets_;
  Table entries_;
  int others_ = 0;  // entries of sets without this rank
  RankSet joined_, left_, blocked_;
  bool unmerged_ = false;
  GroupTally groups_;
  Clock::time_point last_look_ = Clock::now();
  std::vector<Report> reports_;
};

}  // namespace qsgd
