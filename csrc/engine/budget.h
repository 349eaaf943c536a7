// Rank 0's decision to spend more bits on tensors whose codes lose too much.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/submission.h"

namespace qsgd {

class NmseBudget {
 public:
  // How a tensor travels that was asked to travel as `s` says. `nmse` is the largest that any rank
  // measured when the name last came; it decides alone, so equal runs decide alike. What has been
  // raised stays so until the ranks ask for another coding.
  std::optional<CodecSpec> decide(const Submission& s, double nmse);
  // One sentence for each change since the last call.
  std::vector<std::string> take_news();

 private:
  struct Raised {
    std::optional<CodecSpec> asked;
    std::optional<CodecSpec> now;
  };
  std::map<std::pair<int32_t, std::string>, Raised> raised_;  // by process set and name
  std::vector<std::string> news_;
};

// The next better code: QSGD of 2, 4 or 8 bits, then none at all.
std::optional<CodecSpec> with_more_bits(const CodecSpec& spec);

}  // namespace qsgd
