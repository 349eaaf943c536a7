// What the engine's own thread does; see engine_perform.cc for who else may.
#include <algorithm>
#include <iterator>
#include <utility>

#include "common/thread_name.h"
#include "engine/engine.h"

namespace qsgd {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::chrono::milliseconds kCoordinatorNap{20};
constexpr std::chrono::milliseconds kStallCheck{50};
constexpr std::chrono::milliseconds kShortNap{1};  // where others work without this rank

}  // namespace

void Engine::run() {
  name_thread("qsgd-engine");
  std::unique_lock<std::mutex> helm(helm_);  // to the end: nobody works on what is failed there
  try {
    if (size() > 1 && (config_.machine || config_.measure_at_start)) learn_machine();
    while (!finished_) {
      abort_->check();
      const bool busy = turn();
      carry_out_agreed();
      rest(busy, helm);
    }
    messenger_.flush();
  } catch (const std::exception& error) {
    fall(error.what());
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    leaving_ = true;
  }
  entries_.fail_all(abort_->raised() ? abort_->message() : "the engine has shut down");
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

// The job cannot go on.
void Engine::fall(const std::string& cause) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!abort_->raised() && lifeline_) {
    lifeline_->announce("rank " + std::to_string(rank()) + " cannot go on: " + cause);
  }
  abort_->raise(cause);
}

// One round: hand in what is new, hear the others, agree on what to carry out. True if any
// happened.
bool Engine::turn() {
  bool busy = news_.load(std::memory_order_acquire) && take_news();
  busy |= messenger_.progress();
  if (rank() == 0) {
    answer();
  }
  watch_for_stalls();
  return busy;
}

bool Engine::take_news() {
  std::vector<Submission>& fresh = handed_in_;
  bool leaving = false;
  Tuning tuning;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    news_.store(false, std::memory_order_relaxed);
    fresh.swap(fresh_);
    leaving = leaving_ && !left_;
    std::swap(tuning, tuning_);
  }
  coordinator_.tune(tuning);
  const bool busy = !fresh.empty() || leaving;
  if (busy) hand_in(fresh, leaving);
  fresh.clear();
  return busy;
}

void Engine::carry_out_agreed() {
  const std::vector<Response> agreed = std::exchange(agreed_, {});
  executor_.carry_out(agreed);
  if (std::exchange(measures_next_, false)) learn_machine();
}

// Sleeps when there is nothing to do: without a wake-up on the other ranks, with a slow one on
// rank 0, which must hear of ranks that leave; and naps while the others are to be heard. A new
// submission ends either, and others may take the helm meanwhile.
void Engine::rest(bool busy, std::unique_lock<std::mutex>& helm) {
  if (busy) return backoff_.reset();
  std::unique_lock<std::mutex> lock(mutex_);
  const bool watching = left_ || (rank() == 0 && coordinator_.watches_others());
  const auto work = [this] { return !entries_.empty() || leaving_ || abort_->raised(); };
  if (!watching && !work()) {
    const auto nap = coordinator_.has_sets_of_others() ? kShortNap : kCoordinatorNap;
    helm.unlock();
    if (rank() == 0) {
      changed_.wait_for(lock, nap, work);
    } else {
      changed_.wait(lock, work);
    }
    lock.unlock();
    helm.lock();
    return backoff_.reset();
  }
  lock.unlock();
  const std::chrono::nanoseconds nap = backoff_.pause_or_nap();
  if (nap.count() == 0) return;
  helm.unlock();
  lock.lock();
  changed_.wait_for(lock, nap, [this] { return news_.load() || abort_->raised(); });
  lock.unlock();
  helm.lock();
}

void Engine::hand_in(std::vector<Submission>& fresh, bool leaving) {
  left_ |= leaving;
  last_handed_in_ = Coordinator::Clock::now();
  told_waits_.clear();  // rank 0 takes these submissions for a sign that this rank goes on
  for (auto& [operation, nmse] : fresh) {
    if (!operation->coding || operation->coding->nmse_budget <= 0) continue;
    if (!sets_.has(operation->set)) continue;
    const QualityLog& quality = sets_.operations(operation->set).reducer().quality();
    nmse = quality.last_nmse(operation->name);
  }
  if (rank() == 0) {
    for (Submission& submission : fresh) take(0, std::move(submission));
    if (leaving) coordinator_.leave(0, reason_);
    return;
  }
  for (const Submission& submission : fresh) note_arrival(rank(), *submission.operation);
  Writer known, items;
  sent_.write(fresh, known, items);
  // Known ones first: what is new may take their places in the books.
  if (!known.bytes().empty()) messenger_.send(0, FrameType::kKnown, known.bytes());
  if (!items.bytes().empty()) messenger_.send(0, FrameType::kSubmissions, items.bytes());
  if (leaving) {
    Writer item;
    item.put(reason_);
    messenger_.send(0, FrameType::kLeave, item.bytes());
  }
}

void Engine::take(int rank, Submission submission) {
  note_arrival(rank, *submission.operation);
  coordinator_.submit(rank, std::move(submission));
}

void Engine::follow(Reader& body) {
  std::vector<Response> responses;
  while (!body.done()) responses.push_back(Response::read(body, names_));
  note_agreement(responses);
  std::move(responses.begin(), responses.end(), std::back_inserter(agreed_));
}

void Engine::on_message(int peer, FrameType type, Reader body) {
  switch (type) {
    case FrameType::kSubmissions:
      while (!body.done()) take(peer, heard_.at(static_cast<size_t>(peer)).read_item(body));
      return;
    case FrameType::kKnown:
      for (Submission& submission : heard_.at(static_cast<size_t>(peer)).read_known(body)) {
        take(peer, std::move(submission));
      }
      return;
    case FrameType::kLeave:
      return coordinator_.leave(peer, body.text());
    case FrameType::kResponses:
      return follow(body);
    case FrameType::kBlocked: {
      std::vector<Key> keys;
      while (!body.done()) {
        const auto set = body.get<int32_t>();
        keys.emplace_back(set, body.text());
      }
      return coordinator_.block(peer, std::move(keys));
    }
    case FrameType::kMeasure:
      measures_next_ = true;
      return;
    case FrameType::kFarewell:
      finished_ = true;
      return;
  }
  throw internal_error("control message of unknown type from rank " + std::to_string(peer));
}

// Rank 0 tells everyone what to do next, itself last.
void Engine::answer() {
  std::vector<Response> responses = coordinator_.take_ready();
  for (const std::string& sentence : coordinator_.take_news()) {
    if (config_.log) config_.log(sentence);
  }
  if (!responses.empty()) {
    send_out(responses);
    note_agreement(responses);
    const auto others = [](const Response& r) { return r.recipients->front() != 0; };
    std::remove_copy_if(std::make_move_iterator(responses.begin()),
                        std::make_move_iterator(responses.end()), std::back_inserter(agreed_),
                        others);
  }
  if (coordinator_.waits_for_machine() && !measures_next_) {
    for (int peer = 1; peer < size(); ++peer) messenger_.send(peer, FrameType::kMeasure, {});
    messenger_.flush();
    measures_next_ = true;
  }
  if (coordinator_.all_left() && !coordinator_.waits_for_machine() && !finished_) {
    for (int peer = 1; peer < size(); ++peer) messenger_.send(peer, FrameType::kFarewell, {});
    finished_ = true;
  }
}

// To each rank what is for its sets, all in one order, so that no two wait for each other.
void Engine::send_out(const std::vector<Response>& responses) {
  if (size() == 1) return;
  answers_.resize(static_cast<size_t>(size()));
  for (const Response& response : responses) {
    answer_.clear();
    response.write(answer_, names_);
    for (const int peer : *response.recipients) {
      if (peer != 0) answers_[static_cast<size_t>(peer)].append(answer_.bytes());
    }
  }
  for (int peer = 1; peer < size(); ++peer) {
    Writer& mine = answers_[static_cast<size_t>(peer)];
    if (!mine.empty()) messenger_.send(peer, FrameType::kResponses, mine.bytes());
    mine.clear();
  }
  // What comes next may go through shared memory, where messages move on only once in a while.
  messenger_.flush();
}

void Engine::watch_for_stalls() {
  const auto now = Coordinator::Clock::now();
  if (now - last_stall_check_ < kStallCheck) return;
  last_stall_check_ = now;
  if (config_.deadlock_s > 0 && now - last_handed_in_ > Seconds(config_.deadlock_s)) {
    watch_own_waits();
  }
  if (rank() != 0) return;
  if (config_.stall_warning_s > 0 && config_.log) {
    for (const std::string& sentence : coordinator_.stalled(config_.stall_warning_s)) {
      config_.log(sentence);
    }
  }
  if (config_.stall_shutdown_s <= 0) return;
  const std::string overdue = coordinator_.overdue(config_.stall_shutdown_s);
  if (!overdue.empty()) give_up(overdue);
}

// Rank 0 hears what the program here waits for, once; a submission after that takes it back.
void Engine::watch_own_waits() {
  std::vector<Key> keys = entries_.waited_for(config_.deadlock_s);
  if (keys == told_waits_) return;
  told_waits_ = keys;
  if (keys.empty()) return;
  if (rank() == 0) return coordinator_.block(0, std::move(keys));
  Writer items;
  for (const auto& [set, name] : keys) {
    items.put(set);
    items.put(name);
  }
  messenger_.send(0, FrameType::kBlocked, items.bytes());
}

}  // namespace qsgd
