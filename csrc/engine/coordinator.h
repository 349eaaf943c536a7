// Rank 0's table of pending operations. Has no threads and sends no messages: submissions in,
// responses out.
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

  // `node` is the shared memory of rank 0's node; all nodes have one or none. `sums_in_nodes`:
  // whether devices may sum within nodes; null: no.
  Coordinator(int size, const SharedNode* node, const Tuning& tuning, Planning planning,
              std::function<bool()> sums_in_nodes = nullptr);

  // Notes that each of these ranks is ready for the operation.
  void submit(const RankSet& ranks, Submission submission);
  // `rank` submits nothing more; operations that it has not submitted can never be executed.
  void leave(int rank, const std::string& reason);
  // `rank` has been waiting for these for long and does nothing else. If all ranks wait, for
  // different operations, it is a deadlock, and these operations fail.
  void block(int rank, std::vector<Key> waits_for);
  bool all_left() const { return static_cast<int>(left_.size()) == size_; }
  // The ranks of a set; null if there is no such set.
  Members members(int32_t set) const;
  // Ready operations, fused, in the order in which they became ready. Returns nothing until the
  // cycle time since the first has passed, nor while the economy waits for measurements of the
  // machine.
  std::vector<Response> take_ready();
  bool waits_for_machine() const { return waits_for_machine_; }
  void set_machine(const Machine& machine, const PlanRequest& request, Workers* workers);
  // One sentence per tensor that has waited longer than `patience_s` for some ranks; each tensor
  // once.
  std::vector<std::string> stalled(double patience_s);
  // Tensors that have waited so long that rank 0 needs each rank's report; each tensor once.
  std::vector<Key> to_ask_for(double patience_s);
  // A sentence about a tensor that has waited so long that the job must end, or nothing.
  std::string overdue(double patience_s) const;
  // Whether rank 0 must poll although it has nothing pending itself: operations of other sets are
  // pending, or some are ready.
  bool watches_others() const { return others_ > 0 || !ready_.empty(); }
  bool has_sets_of_others() const;
  void tune(const Tuning& tuning) { tuning_.update(tuning); }
  // Decisions since the last call that users may want to know of.
  std::vector<std::string> take_news();

 private:
  struct GroupRanks {
    RankSet ranks;
    uint32_t size = 0;  // of the group; 0: ranks that submitted it in no group
  };
  struct Pending {
    OperationPtr operation;  // of the first rank, or of one that has the tensor on the host
    bool grouped = false;    // held back for its group
    // The ranks that have submitted it as a member of each group; only if the ranks disagree.
    std::map<GroupKey, GroupRanks> by_group;
    Members ranks;  // of its set
    int first_rank = 0, last_rank = 0;
    RankSet has;        // ranks that have submitted it
    RankSet missing;    // ranks that it waits for
    std::string fault;  // difference between the ranks
    double nmse = 0;    // the largest that a rank has reported
    Numbers rows;       // of an allgather, by place in the set
    Clock::time_point since;
    bool asked_for = false;
    bool warned = false;
    // A join may wait for as long as other ranks have batches.
    bool is_late(double patience_s) const {
      return operation->kind != OpKind::kJoin &&
             Seconds(Clock::now() - since).count() >= patience_s;
    }
  };
  using Table = std::map<Key, Pending>;

  void begin(Pending& pending, int rank, OperationPtr operation);
  void refuse(OperationPtr operation);
  void agree(Table::iterator it);
  void decide(Agreed& agreed, const Pending& pending);
  void join(int rank);
  void add_set(Agreed& agreed);
  void remove_set(Agreed& agreed);
  // Completes a group that all ranks have submitted; members that only some ranks have make it
  // fail.
  void complete_group(const GroupKey& key);
  static void note_group(Pending& pending, const RankSet& ranks, const Operation& operation);
  // Removes the tensor from its group, because the ranks disagree on the group.
  void ungroup(Pending& pending, const Operation& other);
  // Fails the members of the group, including those submitted later.
  void break_group(const GroupKey& key, const Fault& fault);
  void fail(Table::iterator it, const Fault& fault);
  void fail_unreachable();
  void fail_deadlocked();
  std::string ranks_missing(const Pending& pending) const;
  std::string describe_wait(const Key& key, const Pending& pending) const;
  void choose_codings();
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
  // Ranks that have submitted a member of a group, but not as one: without this, their members in
  // later steps would complete the group of this step.
  std::vector<std::pair<GroupKey, GroupRanks>> uncounted_;
  ReadyQueue ready_;
  bool waits_for_machine_ = false;
  std::chrono::steady_clock::time_point ready_since_;  // used if there is a cycle time
  int others_ = 0;                                     // pending operations of sets without rank 0
  RankSet joined_;
  std::map<int, std::vector<Key>> blocked_;        // by rank: all that it waits for
  std::vector<std::pair<int, std::string>> left_;  // rank and reason, in order of leaving
};

}  // namespace qsgd
