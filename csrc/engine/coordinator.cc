#include "engine/coordinator.h"

namespace qsgd {
namespace {

constexpr size_t kMaxNamesBytes = 32 << 10;  // of one response, so that it fits a frame
constexpr size_t kRanksListed = 8;

}  // namespace

void Response::write(Writer& to) const {
  to.put(static_cast<uint8_t>(error));
  to.put(message);
  to.put(static_cast<uint32_t>(names.size()));
  for (const std::string& name : names) to.put(name);
}

Response Response::read(Reader& from) {
  Response r;
  r.error = static_cast<ErrorKind>(from.get<uint8_t>());
  r.message = from.text();
  r.names.resize(from.get<uint32_t>());
  for (std::string& name : r.names) name = from.text();
  return r;
}

void Coordinator::submit(int rank, Submission submission) {
  const std::string name = submission.name;
  auto [it, fresh] = pending_.try_emplace(name);
  Pending& p = it->second;
  if (fresh) {
    p.submission = std::move(submission);
    p.first_rank = rank;
    p.has.assign(static_cast<size_t>(size_), false);
    p.missing = size_;
    p.since = Clock::now();
  } else if (p.fault.empty()) {
    p.fault = difference(p.first_rank, p.submission, rank, submission);
  }
  p.has[static_cast<size_t>(rank)] = true;
  if (--p.missing > 0) {
    if (!left_.empty()) fail_unreachable();
    return;
  }
  if (p.fault.empty()) {
    ready_.push_back(std::move(p.submission));
  } else {
    failed_.push_back({ErrorKind::kInternal, p.fault, {name}});
  }
  pending_.erase(it);
}

void Coordinator::leave(int rank, const std::string& reason) {
  left_.emplace_back(rank, reason);
  fail_unreachable();
}

void Coordinator::fail_unreachable() {
  for (const auto& [name, pending] : pending_) {
    for (const auto& [rank, reason] : left_) {
      if (pending.has[static_cast<size_t>(rank)]) continue;
      failed_.push_back({ErrorKind::kRankFailed,
                         "rank " + std::to_string(rank) + " left the job (" + reason +
                             ") without submitting tensor '" + name +
                             "' that other ranks wait for. All ranks must run equally many steps; "
                             "look at that rank's own output for its error.",
                         {name}});
      break;
    }
  }
  for (const Response& response : failed_) {
    for (const std::string& name : response.names) pending_.erase(name);
  }
}

std::vector<Response> Coordinator::take_ready() {
  std::vector<Response> responses;
  responses.swap(failed_);
  while (!ready_.empty()) {
    Response response;
    size_t bytes = 0, names_bytes = 0;
    const Submission first = ready_.front();
    while (!ready_.empty()) {
      const Submission& next = ready_.front();
      const bool joins = response.names.empty() ||
                         (fusable(first, next) && bytes + next.size_bytes() <= fusion_bytes_ &&
                          names_bytes + next.name.size() < kMaxNamesBytes);
      if (!joins) break;
      bytes += next.size_bytes();
      names_bytes += next.name.size() + sizeof(uint32_t);
      response.names.push_back(next.name);
      ready_.pop_front();
    }
    responses.push_back(std::move(response));
  }
  return responses;
}

std::vector<std::string> Coordinator::stalled(Clock::duration patience) {
  std::vector<std::string> sentences;
  const auto now = Clock::now();
  for (auto& [name, pending] : pending_) {
    if (pending.warned || now - pending.since < patience) continue;
    pending.warned = true;
    const auto waited = std::chrono::duration_cast<std::chrono::seconds>(now - pending.since);
    sentences.push_back("tensor '" + name + "' has waited " + std::to_string(waited.count()) +
                        " s for " + ranks_missing(pending) +
                        ". Those ranks are slow, stuck, or take another path through the script.");
  }
  return sentences;
}

std::string Coordinator::ranks_missing(const Pending& pending) const {
  std::string text = pending.missing == 1 ? "rank" : "ranks";
  size_t listed = 0;
  for (int rank = 0; rank < size_; ++rank) {
    if (pending.has[static_cast<size_t>(rank)]) continue;
    if (listed++ == kRanksListed) {
      return text + " and " + std::to_string(static_cast<size_t>(pending.missing) - kRanksListed) +
             " more";
    }
    text += (listed > 1 ? ", " : " ") + std::to_string(rank);
  }
  return text;
}

}  // namespace qsgd
