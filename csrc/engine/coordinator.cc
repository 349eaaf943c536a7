#include "engine/coordinator.h"

#include <algorithm>

#include "common/listed.h"
#include "quant/code.h"

namespace qsgd {
namespace {

// Elements per message coded on a device: a launch and its completion check cost about 20 us.
constexpr size_t kDeviceSegment = size_t{1} << 22;

constexpr size_t kRanksListed = 8;
constexpr size_t kKeysListed = 4;

std::string first_listed(std::vector<int> ranks) {
  ranks.resize(std::min(ranks.size(), kRanksListed));
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks);
}

// Stores the rows that `ranks` contribute to an allgather at their places among `all` ranks of the
// set.
void note_rows(const RankSet& ranks, const RankSet& all, const Submission& submission,
               Numbers& rows) {
  size_t place = 0, nth = 0;
  for (const int rank : all.list()) {
    if (ranks.has(rank)) rows.at(place) = submission.rows_of(nth++);
    ++place;
  }
}

// Zeros change neither a sum nor a maximum of unsigned numbers, such as the sum of booleans. For
// other operations, a joined rank has no defined input.
bool can_run_without_joined(const Operation& o) {
  if (o.kind == OpKind::kJoin) return true;
  const ReduceOp op = o.args.op;
  const bool keeps = op == ReduceOp::kMax && o.args.dtype == DType::kUint8;
  return o.kind == OpKind::kAllreduce &&
         (op <= ReduceOp::kAverage || op == ReduceOp::kAdasum || keeps);
}

// Formats which ranks wait for which operations.
std::string describe_waits(const std::map<Key, std::vector<int>>& waiting) {
  std::string who;
  size_t keys = 0;
  for (const auto& [key, ranks] : waiting) {
    if (keys++ == kKeysListed) {
      who += ", and others";
      break;
    }
    who += (keys > 1 ? ", " : "") + first_listed(ranks);
    who += (ranks.size() > kRanksListed ? "... for '" : " for '") + key.second + "'";
    if (key.first != 0) who += " of process set " + std::to_string(key.first);
  }
  return who;
}

}  // namespace

Coordinator::Coordinator(int size, const SharedNode* node, const Tuning& tuning, Planning planning,
                         std::function<bool()> sums_in_nodes)
    : size_(size),
      node_(node),
      sums_in_nodes_(std::move(sums_in_nodes)),
      tuning_(tuning),
      economy_(size, planning) {
  sets_[0] = std::make_shared<const RankSet>(RankSet::all(size));
}

Members Coordinator::members(int32_t set) const {
  const auto it = sets_.find(set);
  return it == sets_.end() ? nullptr : it->second;
}

void Coordinator::submit(const RankSet& ranks, Submission submission) {
  for (auto it = blocked_.begin(); it != blocked_.end();) {
    it = ranks.has(it->first) ? blocked_.erase(it) : std::next(it);  // another thread submitted
  }
  const Operation& o = *submission.operation;
  const int rank = ranks.first();
  if (sets_.count(o.set) == 0) return refuse(std::move(submission.operation));
  if (o.group) groups_.note(ranks, group_of(o), o.group->size);
  const auto [it, fresh] = pending_.try_emplace(o.key());
  Pending& p = it->second;
  if (fresh) begin(p, rank, submission.operation);
  if (p.operation != submission.operation) {
    const bool groups_differ = group_of(*p.operation) != group_of(o);
    if (groups_differ && p.by_group.empty()) note_group(p, p.has, *p.operation);
    if (p.fault.empty()) p.fault = difference(p.first_rank, *p.operation, rank, o);
    if (groups_differ || p.grouped != o.group.has_value()) ungroup(p, o);
    if (p.operation->on_device && !o.on_device) p.operation = submission.operation;
  }
  if (!p.by_group.empty()) note_group(p, ranks, o);
  p.nmse = std::max(p.nmse, submission.nmse);
  const bool has_rows = !p.rows.empty() && o.kind == OpKind::kAllgather;
  if (has_rows) note_rows(ranks, *p.ranks, submission, p.rows);
  // A rank may have submitted it before: then its earlier operation of that name has failed
  // meanwhile.
  p.has |= ranks;
  p.missing -= ranks;
  p.last_rank = rank;
  const bool complete = p.missing.empty();
  if (o.kind == OpKind::kJoin) join(rank);
  if (complete) {
    agree(it);
  } else if (!left_.empty()) {
    fail_unreachable();
  }
  if (o.group) complete_group(group_of(o));
  while (!uncounted_.empty()) {
    const auto [key, others] = std::move(uncounted_.back());
    uncounted_.pop_back();
    if (groups_.has(key)) groups_.note(others.ranks, key, others.size, /*presumed=*/true);
    complete_group(key);
  }
}

void Coordinator::note_group(Pending& p, const RankSet& ranks, const Operation& o) {
  GroupRanks& group = p.by_group[group_of(o)];
  group.ranks |= ranks;
  group.size = o.group ? o.group->size : 0;
}

void Coordinator::ungroup(Pending& p, const Operation& other) {
  const Fault fault{ErrorKind::kInternal, p.fault};
  if (p.grouped) break_group(group_of(*p.operation), fault);
  if (other.group) break_group(group_of(other), fault);
  p.grouped = false;
}

void Coordinator::break_group(const GroupKey& key, const Fault& fault) {
  groups_.break_up(key, fault);
  ready_.fail_group(key, fault);
}

void Coordinator::complete_group(const GroupKey& key) {
  const Members ranks = sets_.at(key.first);
  if (!groups_.is_whole(key, *ranks, joined_)) return;
  const bool broken{groups_.fault_of(key)};
  for (auto next = pending_.begin(); next != pending_.end();) {
    const auto it = next++;
    Pending& p = it->second;
    if (!p.grouped || group_of(*p.operation) != key) continue;
    if (p.fault.empty() && !broken) {
      p.fault = "tensor '" + p.operation->name + "' is in group '" + key.second + "' of " +
                std::to_string(p.operation->group->size) + " tensors, but not on " +
                ranks_missing(p) + "; every rank must submit a group of the same tensors";
    }
    agree(it);
  }
  groups_.forget(key);
  ready_.release(key);
}

// The submission was in flight when the ranks agreed to remove its set.
void Coordinator::refuse(OperationPtr operation) {
  Agreed agreed;
  agreed.fault = {ErrorKind::kInternal, "tensor '" + operation->name + "': process set " +
                                            std::to_string(operation->set) +
                                            " was removed meanwhile; wait for its handles first"};
  agreed.ranks = sets_.at(0);
  agreed.operation = std::move(operation);
  push(std::move(agreed));
}

void Coordinator::begin(Pending& p, int rank, OperationPtr operation) {
  p.ranks = sets_.at(operation->set);
  p.grouped = operation->group.has_value();
  p.operation = std::move(operation);
  p.first_rank = rank;
  p.missing = *p.ranks;
  if (p.operation->kind != OpKind::kJoin) p.missing -= joined_;
  if (p.operation->kind == OpKind::kAllgather) {
    p.rows.resize(static_cast<size_t>(p.ranks->count()));
  }
  p.since = Clock::now();
  others_ += !p.ranks->has(0);
}

// From now on, `rank` takes part in every operation.
void Coordinator::join(int rank) {
  joined_.add(rank);
  for (auto next = pending_.begin(); next != pending_.end();) {
    const auto it = next++;
    Pending& p = it->second;
    if (p.operation->kind == OpKind::kJoin || !p.missing.has(rank)) continue;
    p.missing.remove(rank);
    if (p.missing.empty()) agree(it);
  }
  for (const GroupKey& key : groups_.keys()) complete_group(key);
}

void Coordinator::agree(Table::iterator it) {
  Pending p = take(it);
  for (const auto& [key, counted] : p.by_group) {
    const RankSet others = *p.ranks - joined_ - counted.ranks;
    if (counted.size > 0) uncounted_.push_back({key, {others, counted.size}});
  }
  const GroupKey group = group_of(*p.operation);
  const Fault broken = p.grouped ? groups_.fault_of(group) : Fault{};
  Agreed agreed;
  agreed.operation = p.operation;
  agreed.ranks = p.ranks;
  // Nothing is held back for a group that is broken or was forgotten after a failure.
  agreed.grouped = p.grouped && !broken && groups_.has(group);
  if (!p.fault.empty()) {
    agreed.fault = {ErrorKind::kInternal, p.fault};
  } else if (broken) {
    agreed.fault = broken;
  } else {
    decide(agreed, p);
  }
  push(std::move(agreed));
}

void Coordinator::decide(Agreed& agreed, const Pending& p) {
  const Operation& o = *agreed.operation;
  const std::string joined = listed((joined_ & *p.ranks).list());
  if (!joined.empty() && !can_run_without_joined(o)) {
    agreed.fault = {ErrorKind::kInternal, "tensor '" + o.name + "': rank(s) " + joined +
                                              " have joined, so there can " + "be no " +
                                              describe(o.kind) +
                                              " until all ranks have; only sums, averages " +
                                              "and Adasum are possible meanwhile"};
    return;
  }
  switch (o.kind) {
    case OpKind::kAddSet:
      return add_set(agreed);
    case OpKind::kRemoveSet:
      return remove_set(agreed);
    case OpKind::kJoin:
      agreed.value = p.last_rank;
      joined_.clear();
      return;
    default:
      agreed.rows = p.rows;
      agreed.joined = !joined.empty();
      agreed.nmse = p.nmse;
      waits_for_machine_ |= economy_.wants_machine(o);
  }
}

void Coordinator::set_machine(const Machine& machine, const PlanRequest& request,
                              Workers* workers) {
  economy_.set(machine, request, workers);
  waits_for_machine_ = false;
}

void Coordinator::choose_codings() {
  for (Agreed& agreed : ready_.waiting()) {
    if (agreed.decided || agreed.fault) continue;
    agreed.decided = true;
    if (agreed.operation->kind != OpKind::kAllreduce) continue;
    agreed.coding = coding(*agreed.operation, agreed.nmse);
    agreed.algorithm = algorithm(agreed);
  }
}

Algorithm Coordinator::algorithm(const Agreed& agreed) {
  const Operation& o = *agreed.operation;
  const bool coded = agreed.coding.has_value();
  // Process sets share no memory. Coding on devices is faster than copying the tensors to the
  // node's memory, but slower than summing within the node on devices.
  const bool on_device = coded && o.on_device;
  const bool whole = o.set == 0 && (!on_device || (sums_in_nodes_ && sums_in_nodes_()));
  Algorithm wanted = *tuning_.algorithm;
  if (wanted == Algorithm::kAuto) {
    const bool alone =
        whole && !on_device && agreed.group == 0 && o.size_bytes() >= *tuning_.fusion_bytes;
    if (alone) wanted = economy_.algorithm_for(agreed.coding, o.count());
  } else if (is_compressed(wanted) != coded || (!whole && traits_of(wanted).has(kNeedsNode))) {
    wanted = Algorithm::kAuto;
  }
  return resolve(agreed.ranks->count(), whole ? node_ : nullptr, coded, wanted);
}

// Codes made on a device are not dropped: the economy's times are those of the host.
std::optional<CodecSpec> Coordinator::coding(const Operation& o, double nmse) {
  if (!o.coding) return std::nullopt;
  std::optional<CodecSpec> spec = o.coding->spec;
  const Choice choice = tuning_.bits ? Choice::kNothing : o.coding->choice;
  const bool has_choice = traits_of(spec->scheme).has_choice();
  if (has_choice && tuning_.bits == kPlainBits) {
    spec.reset();
  } else if (has_choice && tuning_.bits) {
    spec->bits = *tuning_.bits;
  }
  const size_t count = o.count();
  const bool stays = o.on_device && choice == Choice::kNothing;
  if (!stays) spec = economy_.code_for(spec, choice, count);
  return budget_.decide(o, spec, nmse, [&](const std::optional<CodecSpec>& raised) {
    return stays ? raised : economy_.decide(raised, choice, count);
  });
}

void Coordinator::push(Agreed agreed) {
  const bool waits = *tuning_.cycle_time_s > 0;
  if (waits && ready_.empty()) ready_since_ = std::chrono::steady_clock::now();
  ready_.push(std::move(agreed));
}

Coordinator::Pending Coordinator::take(Table::iterator it) {
  Pending p = std::move(it->second);
  others_ -= !p.ranks->has(0);
  pending_.erase(it);
  return p;
}

std::vector<Response> Coordinator::take_ready() {
  if (ready_.empty() || waits_for_machine_) return {};
  const bool waits = *tuning_.cycle_time_s > 0 && left_.empty();  // no more come if a rank left
  const auto now = waits ? std::chrono::steady_clock::now() : ready_since_;
  if (waits && Seconds(now - ready_since_).count() < *tuning_.cycle_time_s) return {};
  choose_codings();
  std::vector<Response> responses = ready_.take(*tuning_.fusion_bytes);
  for (Response& r : responses) {
    r.segment = *tuning_.segment;
    const bool coded = !r.codings.empty();
    if (coded && r.on_device && r.segment.elements() == 0) r.segment = SegmentSize(kDeviceSegment);
    const bool weighed = r.set == 0 && coded && !r.on_device;
    if (weighed) economy_.weigh(r.codings.front(), r.count);
  }
  return responses;
}

bool Coordinator::has_sets_of_others() const {
  return std::any_of(sets_.begin(), sets_.end(),
                     [](const auto& set) { return !set.second->has(0); });
}

void Coordinator::add_set(Agreed& agreed) {
  const Numbers& wanted = agreed.operation->ranks;
  const RankSet ranks = RankSet::of(wanted);
  for (const auto& [id, others] : sets_) {
    if (*others != ranks) continue;
    agreed.fault = {ErrorKind::kUsage, "process set " + describe(wanted) + " exists already, as " +
                                           std::to_string(id) + "; use that one"};
    return;
  }
  agreed.value = next_set_++;
  sets_[static_cast<int32_t>(agreed.value)] = std::make_shared<const RankSet>(ranks);
}

void Coordinator::remove_set(Agreed& agreed) {
  const auto id = static_cast<int32_t>(agreed.operation->ranks.front());
  if (sets_.count(id) == 0) {
    agreed.fault = {ErrorKind::kUsage,
                    "process set " + std::to_string(id) + " was removed already"};
    return;
  }
  for (auto next = pending_.begin(); next != pending_.end();) {
    const auto it = next++;
    if (it->first.first != id) continue;
    fail(it,
         {ErrorKind::kInternal,
          "process set " + std::to_string(id) + " was removed while tensor '" + it->first.second +
              "' waited for " + ranks_missing(it->second) + "; wait for its handles first"});
  }
  for (const GroupKey& key : groups_.keys()) {
    if (key.first != id) continue;
    groups_.forget(key);
    ready_.fail_group(key, {ErrorKind::kInternal,
                            "process set " + std::to_string(id) + " was removed while group '" +
                                key.second + "' was incomplete; wait for its handles first"});
  }
  agreed.value = id;
  sets_.erase(id);
}

void Coordinator::fail(Table::iterator it, const Fault& fault) {
  Pending p = take(it);
  Agreed agreed;
  agreed.operation = p.operation;
  agreed.ranks = p.ranks;
  agreed.fault = fault;
  if (p.operation->kind == OpKind::kJoin) joined_.clear();
  if (p.grouped) {
    const GroupKey group = group_of(*p.operation);
    break_group(group, fault);
    if (groups_.is_over(group)) groups_.forget(group);  // later submissions begin it again
  }
  push(std::move(agreed));
}

void Coordinator::leave(int rank, const std::string& reason) {
  left_.emplace_back(rank, reason);
  fail_unreachable();
  fail_deadlocked();
}

void Coordinator::fail_unreachable() {
  for (auto next = pending_.begin(); next != pending_.end();) {
    const auto it = next++;
    const RankSet lacking = *it->second.ranks - it->second.has;
    for (const auto& [rank, reason] : left_) {
      if (!lacking.has(rank)) continue;
      fail(it, {ErrorKind::kRankFailed,
                "rank " + std::to_string(rank) + " left the job (" + reason +
                    ") without submitting tensor '" + it->first.second +
                    "' that other ranks wait for. All ranks must run equally many steps; look at "
                    "that rank's own output for its error."});
      break;
    }
  }
}

void Coordinator::block(int rank, std::vector<Key> waits_for) {
  blocked_[rank] = std::move(waits_for);
  fail_deadlocked();
}

void Coordinator::fail_deadlocked() {
  if (blocked_.size() + left_.size() < static_cast<size_t>(size_)) return;
  std::map<Key, std::vector<int>> waiting;
  RankSet running = *sets_.at(0);
  for (const auto& [rank, reason] : left_) running.remove(rank);
  for (const auto& [rank, keys] : blocked_) {
    for (const Key& key : keys) {
      const auto it = pending_.find(key);
      const bool waits =
          it == pending_.end() ? ready_.holds(key) != nullptr : it->second.has.has(rank);
      if (!waits) continue;
      running.remove(rank);
      waiting[key].push_back(rank);
    }
  }
  if (!running.empty()) return;
  const std::string who = describe_waits(waiting);
  const Fault fault{
      ErrorKind::kInternal,
      "the ranks wait for one another: " + who +
          ". Every rank must submit operations of the same names, and unnamed ones in the same "
          "order; look for a branch that only some ranks take."};
  for (const auto& [key, ranks] : waiting) {
    const auto it = pending_.find(key);
    if (it != pending_.end()) {
      const bool joins = it->second.operation->kind == OpKind::kJoin;
      if (!joins) fail(it, fault);
    } else if (const Operation* held = ready_.holds(key)) {
      break_group(group_of(*held), fault);
    }
  }
}

std::vector<std::string> Coordinator::take_news() {
  std::vector<std::string> news = budget_.take_news();
  for (std::string& sentence : economy_.take_news()) news.push_back(std::move(sentence));
  return news;
}

std::vector<std::string> Coordinator::stalled(double patience_s) {
  std::vector<std::string> sentences;
  for (auto& [key, pending] : pending_) {
    if (pending.warned || !pending.is_late(patience_s)) continue;
    pending.warned = true;
    sentences.push_back(describe_wait(key, pending) +
                        ". Those ranks are slow, stuck, or take another path through the script.");
  }
  return sentences;
}

std::vector<Key> Coordinator::to_ask_for(double patience_s) {
  std::vector<Key> keys;
  for (auto& [key, pending] : pending_) {
    if (pending.asked_for || !pending.is_late(patience_s)) continue;
    pending.asked_for = true;
    keys.push_back(key);
  }
  return keys;
}

std::string Coordinator::overdue(double patience_s) const {
  for (const auto& [key, pending] : pending_) {
    if (!pending.is_late(patience_s)) continue;
    return describe_wait(key, pending) +
           ", longer than QSGD_STALL_SHUTDOWN_S allows, so the job ends. " +
           "Look at those ranks' own output, or allow more.";
  }
  return {};
}

std::string Coordinator::describe_wait(const Key& key, const Pending& pending) const {
  const auto waited =
      std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - pending.since);
  return "tensor '" + key.second + "' has waited " + std::to_string(waited.count()) + " s for " +
         ranks_missing(pending);
}

std::string Coordinator::ranks_missing(const Pending& pending) const {
  const std::vector<int> ranks = pending.missing.list();
  const std::string first = first_listed(ranks);
  if (ranks.size() <= kRanksListed) return first;
  return first + " and " + std::to_string(ranks.size() - kRanksListed) + " more";
}

}  // namespace qsgd
