#include "engine/engine.h"

#include "collectives/broadcast.h"
#include "collectives/ring_allreduce.h"
#include "collectives/sra_allreduce.h"

namespace qsgd {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::chrono::milliseconds kCoordinatorNap{20};

uint32_t hash_name(const std::string& name) {  // FNV-1a
  uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

}  // namespace

Engine::Engine(std::unique_ptr<Transport> transport, std::shared_ptr<AbortFlag> abort,
               EngineConfig config)
    : transport_(std::move(transport)),
      abort_(std::move(abort)),
      config_(std::move(config)),
      coordinator_(transport_->size(), config_.fusion_bytes),
      messenger_(*transport_,
                 [this](int peer, FrameType type, Reader body) { on_frame(peer, type, body); }),
      thread_([this] { run(); }) {}

Engine::~Engine() {
  if (!thread_.joinable()) return;
  give_up("rank " + std::to_string(rank()) + " stopped without leaving the job");
  thread_.join();
}

std::shared_ptr<Handle> Engine::submit(Submission submission, const void* in, void* out) {
  const std::string name = submission.name;
  if (name.empty() || name.size() > kMaxName) {
    throw usage_error("tensor name of " + std::to_string(name.size()) + " bytes: use 1 to " +
                      std::to_string(kMaxName));
  }
  if (submission.kind == OpKind::kBroadcast && (submission.root < 0 || submission.root >= size())) {
    throw usage_error("broadcast of '" + name + "': root_rank=" + std::to_string(submission.root) +
                      " is not a rank of this job; it has ranks 0 to " +
                      std::to_string(size() - 1));
  }
  if (submission.quantised) {
    check(submission.spec);
    if (submission.args.dtype != DType::kFloat32 || submission.args.op > ReduceOp::kAverage) {
      throw usage_error("allreduce of '" + name +
                        "': QSGD compresses sums and averages of float32; use "
                        "Compression.none for this tensor");
    }
  }
  auto handle = std::make_shared<Handle>(abort_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (abort_->raised()) abort_->set_noticed();
    abort_->check();
    if (leaving_) throw usage_error("'" + name + "' was submitted after shutdown(); call init()");
    const auto [it, inserted] = entries_.try_emplace(name, Entry{submission, in, out, handle});
    if (!inserted) {
      throw usage_error("tensor '" + name +
                        "' is already being reduced; wait for its handle first, or give each "
                        "operation a name of its own");
    }
    fresh_.push_back(std::move(submission));
  }
  changed_.notify_all();
  return handle;
}

void Engine::shutdown(const std::string& reason, double patience_s) {
  if (!thread_.joinable()) return;
  bool in_time;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    leaving_ = true;
    reason_ = reason.substr(0, kMaxName);
    changed_.notify_all();
    in_time = changed_.wait_for(lock, Seconds(patience_s), [this] { return ended_; });
  }
  if (!in_time) give_up("rank " + std::to_string(rank()) + " left the job (" + reason + ")");
  thread_.join();
  if (lifeline_) lifeline_->close(in_time);
}

void Engine::give_up(const std::string& message) {
  if (lifeline_) lifeline_->announce(message);
  abort(message);
}

void Engine::abort(const std::string& message) {
  abort_->raise(message);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
  }  // not between a sleeper's look and its sleep
  changed_.notify_all();
}

void Engine::watch(std::vector<Lifeline::Peer> peers, double grace_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  lifeline_ = std::make_unique<Lifeline>(
      rank(), std::move(peers), [this](const std::string& loss) { abort(loss); },
      [this] { return abort_->noticed(); }, grace_s);
}

EngineStats Engine::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  EngineStats stats = stats_;
  stats.wire_bytes = transport_->bytes_sent();
  return stats;
}

void Engine::run() {
  try {
    while (!finished_) {
      abort_->check();
      rest(turn());
    }
    messenger_.flush();
  } catch (const std::exception& error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!abort_->raised() && lifeline_) {
      lifeline_->announce("rank " + std::to_string(rank()) + " cannot go on: " + error.what());
    }
    abort_->raise(error.what());
  }
  fail_all(abort_->raised() ? abort_->message() : "the engine has shut down");
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

// One round: hand in what is new, hear the others, carry out what is ready. True if any happened.
bool Engine::turn() {
  std::vector<Submission> fresh;
  bool leaving = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    fresh.swap(fresh_);
    leaving = leaving_ && !left_;
  }
  bool busy = !fresh.empty() || leaving;
  if (busy) hand_in(std::move(fresh), leaving);
  busy |= messenger_.progress();
  if (rank() == 0) {
    answer();
    warn_of_stalls();
  }
  return busy;
}

// Sleeps when there is nothing to do: without a wake-up on the other ranks, with a slow one on
// rank 0, which must hear of ranks that leave.
void Engine::rest(bool busy) {
  if (busy) return backoff_.reset();
  std::unique_lock<std::mutex> lock(mutex_);
  const bool waiting = !entries_.empty() || left_;
  const auto work = [this] { return !fresh_.empty() || leaving_ || abort_->raised(); };
  if (!waiting && !work()) {
    if (rank() == 0) {
      changed_.wait_for(lock, kCoordinatorNap, work);
    } else {
      changed_.wait(lock, work);
    }
    return backoff_.reset();
  }
  lock.unlock();
  backoff_.pause();
}

void Engine::hand_in(std::vector<Submission> fresh, bool leaving) {
  left_ |= leaving;
  if (rank() == 0) {
    for (Submission& submission : fresh) coordinator_.submit(0, std::move(submission));
    if (leaving) coordinator_.leave(0, reason_);
    return;
  }
  std::vector<std::vector<char>> items;
  for (const Submission& submission : fresh) {
    Writer item;
    submission.write(item);
    items.push_back(item.bytes());
  }
  if (!items.empty()) messenger_.send(0, FrameType::kSubmissions, items);
  if (leaving) {
    Writer item;
    item.put(reason_);
    messenger_.send(0, FrameType::kLeave, {item.bytes()});
  }
}

void Engine::on_frame(int peer, FrameType type, Reader body) {
  switch (type) {
    case FrameType::kSubmissions:
      while (!body.done()) coordinator_.submit(peer, Submission::read(body));
      return;
    case FrameType::kLeave:
      return coordinator_.leave(peer, body.text());
    case FrameType::kResponses:
      while (!body.done()) carry_out(Response::read(body));
      return;
    case FrameType::kFarewell:
      finished_ = true;
      return;
  }
  throw internal_error("control frame of unknown type from rank " + std::to_string(peer));
}

// Rank 0 tells everyone what to do next, then does its own part.
void Engine::answer() {
  const std::vector<Response> responses = coordinator_.take_ready();
  if (!responses.empty()) {
    std::vector<std::vector<char>> items;
    for (const Response& response : responses) {
      Writer item;
      response.write(item);
      items.push_back(item.bytes());
    }
    for (int peer = 1; peer < size(); ++peer) messenger_.send(peer, FrameType::kResponses, items);
    for (const Response& response : responses) carry_out(response);
  }
  if (coordinator_.all_left() && !finished_) {
    for (int peer = 1; peer < size(); ++peer) messenger_.send(peer, FrameType::kFarewell, {});
    finished_ = true;
  }
}

void Engine::carry_out(const Response& response) {
  if (response.error != ErrorKind::kNone) {
    for (const std::string& name : response.names) complete(name, response.error, response.message);
    return;
  }
  std::vector<Entry*> entries;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Map nodes stay put, and only this thread erases them.
    for (const std::string& name : response.names) entries.push_back(&entries_.at(name));
  }
  const auto start = Coordinator::Clock::now();
  if (entries.front()->submission.kind == OpKind::kBroadcast) {
    const Submission& s = entries.front()->submission;
    broadcast(*transport_, entries.front()->out, s.size_bytes(), s.root);
    complete(s.name, ErrorKind::kNone, {});
  } else {
    reduce(entries);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.comm_time_s += Seconds(Coordinator::Clock::now() - start).count();
}

void Engine::reduce(std::vector<Entry*>& entries) {
  const Submission& first = entries.front()->submission;
  std::vector<ReduceTensor> tensors;
  uint64_t bytes = 0;
  for (const Entry* entry : entries) {
    const std::string& name = entry->submission.name;
    const uint32_t step = first.quantised ? steps_[name]++ : 0;
    tensors.push_back({entry->in, entry->out, entry->submission.count(), hash_name(name), step});
    bytes += entry->submission.size_bytes();
  }
  if (first.quantised) {
    sra_allreduce(*transport_, tensors, first.args, first.spec, config_.seed);
  } else {
    ring_allreduce(*transport_, tensors, first.args);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.gradient_bytes += bytes;
    stats_.allreduces += entries.size();
    ++stats_.fused;
  }
  std::vector<std::string> faults(entries.size());
  if (first.check_finite && config_.nonfinite != NonFinite::kPropagate) {
    faults = find_nonfinite(entries, tensors);
  }
  // Completing an entry frees it, so its name is copied first.
  for (size_t i = 0; i < entries.size(); ++i) {
    const std::string name = entries[i]->submission.name;
    complete(name, faults[i].empty() ? ErrorKind::kNone : ErrorKind::kNonFinite, faults[i]);
  }
}

// Returns a message for every tensor that must fail. The results are equal everywhere, so every
// rank comes here with the same bad tensors; whose they were takes one more small exchange.
std::vector<std::string> Engine::find_nonfinite(const std::vector<Entry*>& entries,
                                                const std::vector<ReduceTensor>& tensors) {
  std::vector<std::string> faults(entries.size());
  std::vector<size_t> bad;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].result_finite) bad.push_back(i);
  }
  if (bad.empty()) return faults;
  const auto ranks = static_cast<size_t>(size());
  std::vector<int32_t> guilty(bad.size() * ranks, 0);
  for (size_t b = 0; b < bad.size(); ++b) {
    guilty[b * ranks + static_cast<size_t>(rank())] = !tensors[bad[b]].input_finite;
  }
  std::vector<ReduceTensor> flags{{guilty.data(), guilty.data(), guilty.size(), 0, 0}};
  ring_allreduce(*transport_, flags, {DType::kInt32, ReduceOp::kSum, 1, 1});
  for (size_t b = 0; b < bad.size(); ++b) {
    std::string from;
    for (size_t r = 0; r < ranks; ++r) {
      if (guilty[b * ranks + r]) from += (from.empty() ? "" : ", ") + std::to_string(r);
    }
    const std::string message =
        "tensor '" + entries[bad[b]]->submission.name + "' holds NaN or Inf after allreduce; " +
        (from.empty() ? "every rank's own values were finite, so the sum overflowed"
                      : "the values came from rank(s) " + from) +
        ". Lower the learning rate or scale the loss; QSGD_NONFINITE=warn or =propagate lets "
        "training go on (a loss scaler needs propagate).";
    if (config_.nonfinite == NonFinite::kError) {
      faults[bad[b]] = message;
    } else if (rank() == 0 && config_.log) {
      config_.log(message);
    }
  }
  return faults;
}

void Engine::complete(const std::string& name, ErrorKind kind, const std::string& message) {
  std::shared_ptr<Handle> handle;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = entries_.find(name);
    if (it == entries_.end()) return;  // failed before, or never submitted here
    handle = it->second.handle;
    entries_.erase(it);
  }
  handle->finish(kind, message);
}

void Engine::fail_all(const std::string& message) {
  std::map<std::string, Entry> entries;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries.swap(entries_);
    leaving_ = true;
  }
  for (auto& [name, entry] : entries) entry.handle->finish(ErrorKind::kRankFailed, message);
}

void Engine::warn_of_stalls() {
  if (config_.stall_warning_s <= 0 || !config_.log) return;
  const auto now = Coordinator::Clock::now();
  if (Seconds(now - last_stall_check_).count() < config_.stall_warning_s / 4) return;
  last_stall_check_ = now;
  const auto patience =
      std::chrono::duration_cast<Coordinator::Clock::duration>(Seconds(config_.stall_warning_s));
  for (const std::string& sentence : coordinator_.stalled(patience)) config_.log(sentence);
}

}  // namespace qsgd
