#include "engine/executor.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

#include "common/coarse_clock.h"
#include "common/kept.h"

namespace qsgd {
namespace {

using Clock = std::chrono::steady_clock;

// The contribution of a rank that has joined: zeros.
struct StandIn {
  Memory zeros;
  Entry entry;
};

StandIn stand_in(const OperationPtr& operation) {
  StandIn s{Memory(operation->size_bytes()), {}};
  if (s.zeros.size() > 0) std::memset(s.zeros.data(), 0, s.zeros.size());
  s.entry = {operation, s.zeros.data(), s.zeros.data(), nullptr};
  return s;
}

}  // namespace

void Executor::carry_out(const std::vector<Response>& responses) {
  for (const Response& response : responses) {
    if (!response.fault) end_finished();
    carry_out(response);
    if (!response.fault) end_finished();
  }
  end_finished();
}

void Executor::carry_out(const Response& response) {
  std::vector<Outcome> outcomes;
  if (response.fault) {
    outcomes.resize(response.names.size());
    for (Outcome& outcome : outcomes) outcome.fault = response.fault;
  } else {
    outcomes = work(response);
  }
  for (size_t i = 0; i < outcomes.size(); ++i) {
    held_.emplace_back(Key(response.set, response.names[i]), std::move(outcomes[i]));
  }
  if (!response.group_goes_on) finish_held(response.grouped);
}

std::vector<Outcome> Executor::work(const Response& response) {
  KeptOnFailure<std::vector<StandIn>> stand_ins;
  stand_ins->reserve(response.operations.size());
  std::vector<Entry*> entries;
  for (size_t i = 0; i < response.names.size(); ++i) {
    Entry* entry = entries_.find({response.set, response.names[i]});
    if (entry == nullptr) {
      stand_ins->push_back(stand_in(response.operations.at(i)));
      entry = &stand_ins->back().entry;
    }
    entries.push_back(entry);
  }
  const OpKind kind = entries.front()->operation->kind;
  const auto start = Clock::now();
  double coding_s = 0;
  std::vector<Outcome> outcomes;
  if (changes_ranks(kind)) {
    change_sets(*entries.front()->operation, response.value);
    outcomes.emplace_back();
    outcomes.front().result.value = response.value;
  } else {
    const uint64_t given = bytes_given(communicator_).total();
    Operations& operations = sets_.operations(response.set);
    const bool staged = operations.needs_host(response, entries);
    const KeptOnFailure<std::shared_ptr<Staging>> staging{
        staged ? std::make_shared<Staging>(entries) : nullptr};
    outcomes = operations.carry_out(response, staged ? (*staging)->entries() : entries);
    if (staged) {
      (*staging)->deliver();
      landing_.push_back(*staging);
    }
    if (kind == OpKind::kAllreduce) coding_s = operations.reducer().last_exchange().coding_s;
    note_({response, entries, outcomes, start, bytes_given(communicator_).total() - given});
  }
  count(entries, Seconds(Clock::now() - start).count(), coding_s);
  return outcomes;
}

void Executor::change_sets(const Operation& operation, int64_t id) {
  const std::vector<int> ranks(operation.ranks.begin(), operation.ranks.end());
  if (operation.kind == OpKind::kAddSet) sets_.add(static_cast<int32_t>(id), ranks);
  if (operation.kind == OpKind::kRemoveSet) sets_.remove(static_cast<int32_t>(id));
}

// If one member of a group fails, all do.
void Executor::finish_held(bool grouped) {
  const auto failed = std::find_if(held_.begin(), held_.end(),
                                   [](const Ended& ended) { return bool{ended.second.fault}; });
  if (grouped && failed != held_.end()) {
    const Fault fault = failed->second.fault;
    for (auto& [key, outcome] : held_) outcome.fault = fault;
  }
  std::move(held_.begin(), held_.end(), std::back_inserter(finished_));
  held_.clear();
}

void Executor::end_finished() {
  if (!held_.empty()) {  // the copies of a group's members land before any member completes
    end_landed();
    return;
  }
  std::vector<Ended> finished;
  finished.swap(finished_);
  if (landing_.empty()) {
    entries_.end(std::move(finished));
  } else {
    in_flight_.emplace_back(std::exchange(landing_, {}), std::move(finished));
  }
  end_landed();
}

bool Executor::end_landed() {
  while (!in_flight_.empty()) {
    auto& [stagings, ended] = in_flight_.front();
    if (!std::all_of(stagings.begin(), stagings.end(), [](auto& s) { return s->has_landed(); })) {
      return true;
    }
    entries_.end(std::move(ended));
    in_flight_.pop_front();
  }
  return false;
}

void Executor::count(const std::vector<Entry*>& entries, double seconds, double coding_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  done_.comm_time_s += seconds;
  done_.coding_time_s += coding_s;
  if (entries.front()->operation->kind != OpKind::kAllreduce) return;
  for (const Entry* entry : entries) done_.gradient_bytes += entry->operation->size_bytes();
  done_.allreduces += entries.size();
  ++done_.fused;
}

WorkDone Executor::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

}  // namespace qsgd
