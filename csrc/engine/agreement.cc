#include "engine/agreement.h"

#include <algorithm>
#include <iterator>

namespace qsgd {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::chrono::milliseconds kWatch{50};

}  // namespace

Agreement::Agreement(Transport& transport, SharedNode* node, Timeline& timeline, Config config)
    : transport_(transport),
      timeline_(timeline),
      config_(std::move(config)),
      coordinator_(size(), node, config_.tuning, config_.planning),
      messenger_(transport, node,
                 [this](int peer, FrameType type, Reader body) { on_message(peer, type, body); }),
      sent_(std::min(config_.cache_capacity, kMaxBook)),
      heard_(static_cast<size_t>(is_first() ? size() : 0),
             HeardBook(std::min(config_.cache_capacity, kMaxBook))),
      names_(std::min(config_.cache_capacity, kMaxBook)) {}

void Agreement::submit(std::vector<Submission>& submissions) {
  last_submission_ = Coordinator::Clock::now();
  told_waits_.clear();  // rank 0 takes these for a sign that this rank goes on
  if (is_first()) {
    for (Submission& submission : submissions) receive(0, std::move(submission));
    return;
  }
  for (const Submission& submission : submissions) note_arrival(rank(), *submission.operation);
  Writer known, items;
  sent_.write(submissions, known, items);
  // Known ones first: what is new may take their places in the books.
  if (!known.bytes().empty()) messenger_.send(0, FrameType::kKnown, known.bytes());
  if (!items.bytes().empty()) messenger_.send(0, FrameType::kSubmissions, items.bytes());
}

void Agreement::leave(const std::string& reason) {
  left_ = true;
  last_submission_ = Coordinator::Clock::now();
  told_waits_.clear();
  if (is_first()) return coordinator_.leave(0, reason);
  Writer item;
  item.put(reason);
  messenger_.send(0, FrameType::kLeave, item.bytes());
}

void Agreement::receive(int rank, Submission submission) {
  note_arrival(rank, *submission.operation);
  coordinator_.submit(rank, std::move(submission));
}

bool Agreement::make_progress() {
  const bool heard = messenger_.progress();
  if (is_first()) answer();
  return heard;
}

void Agreement::on_message(int peer, FrameType type, Reader body) {
  switch (type) {
    case FrameType::kSubmissions:
      while (!body.done()) receive(peer, heard_.at(static_cast<size_t>(peer)).read_item(body));
      return;
    case FrameType::kKnown:
      for (Submission& submission : heard_.at(static_cast<size_t>(peer)).read_known(body)) {
        receive(peer, std::move(submission));
      }
      return;
    case FrameType::kLeave:
      return coordinator_.leave(peer, body.text());
    case FrameType::kResponses:
      return read_responses(body);
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
      over_ = true;
      return;
  }
  throw internal_error("control message of unknown type from rank " + std::to_string(peer));
}

void Agreement::read_responses(Reader& body) {
  std::vector<Response> responses;
  while (!body.done()) responses.push_back(Response::read(body, names_));
  note_agreement(responses);
  std::move(responses.begin(), responses.end(), std::back_inserter(agreed_));
}

// Rank 0 tells everyone what to do next, itself last.
void Agreement::answer() {
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
    send_to_all(FrameType::kMeasure);
    messenger_.flush();
    measures_next_ = true;
  }
  if (coordinator_.all_left() && !coordinator_.waits_for_machine() && !over_) {
    send_to_all(FrameType::kFarewell);
    over_ = true;
  }
}

// To each rank what is for its sets, all in one order, so that no two wait for each other.
void Agreement::send_out(const std::vector<Response>& responses) {
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

void Agreement::send_to_all(FrameType type) {
  for (int peer = 1; peer < size(); ++peer) messenger_.send(peer, type, {});
}

void Agreement::watch_waits(const Entries& entries) {
  const auto now = Coordinator::Clock::now();
  if (now - last_watch_ < kWatch) return;
  last_watch_ = now;
  if (config_.deadlock_s > 0 && now - last_submission_ > Seconds(config_.deadlock_s)) {
    report_own_waits(entries);
  }
  if (!is_first()) return;
  if (config_.stall_warning_s > 0 && config_.log) {
    for (const std::string& sentence : coordinator_.stalled(config_.stall_warning_s)) {
      config_.log(sentence);
    }
  }
  if (config_.stall_shutdown_s <= 0) return;
  const std::string overdue = coordinator_.overdue(config_.stall_shutdown_s);
  if (!overdue.empty()) config_.give_up(overdue);
}

// Rank 0 hears what the program here waits for, once; a submission after that takes it back.
void Agreement::report_own_waits(const Entries& entries) {
  std::vector<Key> keys = entries.waited_for(config_.deadlock_s);
  if (keys == told_waits_) return;
  told_waits_ = keys;
  if (keys.empty()) return;
  if (is_first()) return coordinator_.block(0, std::move(keys));
  Writer items;
  for (const auto& [set, name] : keys) {
    items.put(set);
    items.put(name);
  }
  messenger_.send(0, FrameType::kBlocked, items.bytes());
}

void Agreement::note_arrival(int rank, const Operation& operation) {
  if (!timeline_.on()) return;
  timeline_.arrived(Timeline::row_of(operation.set, operation.name), describe(operation.kind), rank,
                    Timeline::Clock::now());
}

void Agreement::note_agreement(const std::vector<Response>& responses) {
  if (!timeline_.on()) return;
  timeline_.cycle();
  for (const Response& response : responses) {
    for (const std::string& name : response.names) {
      timeline_.agreed(Timeline::row_of(response.set, name), response.message);
    }
  }
}

}  // namespace qsgd
