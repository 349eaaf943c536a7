// Rank 0's decision to spend more bits on tensors whose codes lose too much.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/operation.h"

namespace qsgd {

class NmseBudget {
 public:
  // How the tensor of an operation travels that is to travel as `asked`, its coding's spec but for
  // what was tuned. `nmse` is the largest that any rank measured when the name last came; it
  // decides alone, so equal runs decide alike. What has been raised stays so until another spec is
  // asked.
  std::optional<CodecSpec> decide(const Operation& operation, const std::optional<CodecSpec>& asked,
                                  double nmse);
  // One sentence for each change since the last call.
  std::vector<std::string> take_news();

 private:
  struct Raised {
    std::optional<CodecSpec> asked;
    std::optional<CodecSpec> now;
  };
  std::map<Key, Raised> raised_;
  std::vector<std::string> news_;
};

// The next better code: QSGD of 2, 4 or 8 bits, then none at all.
std::optional<CodecSpec> with_more_bits(const CodecSpec& spec);

}  // namespace qsgd
