// Rank 0's table of what is ready everywhere. No threads, no messages: submissions in, responses
// out.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "engine/submission.h"

namespace qsgd {

// Operations that all ranks now carry out together, in this order; or that all ranks must fail.
struct Response {
  ErrorKind error = ErrorKind::kNone;
  std::string message;
  std::vector<std::string> names;

  void write(Writer& to) const;
  static Response read(Reader& from);
};

class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;

  Coordinator(int size, size_t fusion_bytes) : size_(size), fusion_bytes_(fusion_bytes) {}

  void submit(int rank, Submission submission);
  // `rank` submits nothing any more; what it has not submitted can never be reduced.
  void leave(int rank, const std::string& reason);
  bool all_left() const { return static_cast<int>(left_.size()) == size_; }
  // What has become ready, fused, in the order of becoming so.
  std::vector<Response> take_ready();
  // One sentence per tensor that has waited longer than `patience` for some ranks; each once.
  std::vector<std::string> stalled(Clock::duration patience);

 private:
  struct Pending {
    Submission submission;  // of the first rank that came
    int first_rank;
    std::vector<bool> has;  // by rank
    int missing;
    std::string fault;  // what the ranks disagree on
    Clock::time_point since;
    bool warned = false;
  };
  std::string ranks_missing(const Pending& pending) const;
  void fail_unreachable();

  const int size_;
  const size_t fusion_bytes_;
  std::map<std::string, Pending> pending_;
  std::deque<Submission> ready_;
  std::vector<Response> failed_;
  std::vector<std::pair<int, std::string>> left_;  // rank and reason, the first cause first
};

}  // namespace qsgd
