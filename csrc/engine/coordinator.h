// Rank 0's table of what is ready everywhere. No threads, no messages: submissions in, responses
// out.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/coarse_clock.h"
#include "engine/books.h"
#include "engine/budget.h"
#include "engine/economy.h"
#include "engine/group_tally.h"
#include "engine/ready_queue.h"
#include "engine/tuning.h"

namespace qsgd {

class Coordinator {
 public:
  using Clock = CoarseClock;

  // `node` is the memory that rank 0 shares with others, as the other ranks do on their nodes.
  // `sums_in_nodes`: whether their devices may sum there; null: no.
  Coordinator(int size, const SharedNode* node, const Tuning& tuning, Planning planning,
              std::function<bool()> sums_in_nodes = nullptr);

  // Each of these ranks is ready for it.
  void submit(const RankSet& ranks, Submission submission);
  // `rank` submits nothing any more; what it has not submitted can never be reduced.
  void leave(int rank, const std::string& reason);
  // `rank` does nothing but wait for these, and has for long. Where all ranks do so, for different
  // ones, none will ever go on: what they wait for fails.
  void block(int rank, std::vector<Key> waits_for);
  bool all_left() const { return static_cast<int>(left_.size()) == size_; }
  // The ranks of a set; null where there is no such set.
  Members members(int32_t set) const;
  // What has become ready, fused, in the order of becoming so. Nothing before the cycle time has
  // passed since the first of it did, nor while it waits for the economy to know the machine.
  std::vector<Response> take_ready();
  bool waits_for_machine() const { return waits_for_machine_; }
  void know_machine(const Machine& machine, const PlanRequest& request, Workers* workers);
  // One sentence per tensor that has waited longer than `patience_s` for some ranks; each once.
  std::vector<std::string> stalled(double patience_s);
  // What has waited so long for some ranks that rank 0 should hear of every rank that comes; each
  // once.
  std::vector<Key> to_ask_for(double patience_s);
  // A sentence on a tensor that has waited so long that the job is to end, or nothing.
  std::string overdue(double patience_s) const;
  // Whether anything waits for ranks of a set without rank 0, which nothing else wakes then.
  bool watches_others() const { return others_ > 0 || !ready_.empty(); }
  bool has_sets_of_others() const;
  void tune(const Tuning& tuning) { tuning_.update(tuning); }
  // What was decided since the last call and users may want to know.
  std::vector<std::string> take_news();

 private:
  struct Pending {
    OperationPtr operation;  // of the first rank that came, or that has it not on a device
    bool grouped = false;    // its group holds it back
    Members ranks;           // of its set
    int first_rank = 0, last_rank = 0;
    RankSet has;        // that have submitted it
    RankSet missing;    // for which it waits
    std::string fault;  // what the ranks disagree on
    double nmse = 0;    // the largest that a rank has reported
    Numbers rows;       // of an allgather, by place in the set
    Clock::time_point since;
    bool asked_for = false;
    bool warned = false;
  };
  using Table = std::map<Key, Pending>;

  void begin(Pending& pending, int rank, OperationPtr operation);
  void refuse(OperationPtr operation);
  void agree(Table::iterator it);
  void decide(Agreed& agreed, const Pending& pending);
  void join(int rank);
  void add_set(Agreed& agreed);
  void remove_set(Agreed& agreed);
  // Ends a group that all ranks have submitted; what only some of them have fails it.
  void settle(const GroupKey& key);
  // The ranks disagree on what group the tensor is in, so it is in none.
  void ungroup(Pending& pending, const Operation& other);
  // What has come of it fails, and so will what is yet to come.
  void break_group(const GroupKey& key, ErrorKind error, const std::string& fault);
  void fail(Table::iterator it, ErrorKind error, const std::string& message);
  void fail_unreachable();
  void fail_deadlocked();
  std::string ranks_missing(const Pending& pending) const;
  std::string waits(const Key& key, const Pending& pending) const;
  void decide_how_they_travel();
  std::optional<CodecSpec> coding(const Operation& operation, double nmse);
  Algorithm algorithm(const Agreed& agreed);
  void push(Agreed agreed);
  Pending take(Table::iterator it);

  const int size_;
  const SharedNode* const node_;
  const std::function<bool()> sums_in_nodes_;
  Tuning tuning_;
  NmseBudget budget_;
  Economy economy_;
  std::map<int32_t, Members> sets_;
  int32_t next_set_ = 1;
  Table pending_;
  GroupTally groups_;
  ReadyQueue ready_;
  bool waits_for_machine_ = false;
  std::chrono::steady_clock::time_point ready_since_;  // where there is a cycle time
  int others_ = 0;                                     // of pending_, those of sets without rank 0
  RankSet joined_;
  std::map<int, std::vector<Key>> blocked_;        // by rank: what alone it waits for
  std::vector<std::pair<int, std::string>> left_;  // rank and reason, the first cause first
};

}  // namespace qsgd
