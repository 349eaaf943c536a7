// Rank 0's choice of more bits for tensors whose coding error exceeds their budget.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/operation.h"

namespace qsgd {

class NmseBudget {
 public:
  // Returns the code that is really sent for a raised one: the same, or none if it does not pay.
  using Fit = std::function<std::optional<CodecSpec>(const std::optional<CodecSpec>&)>;

  // Returns the code for the operation's tensor. `asked` is the requested one: the coding's spec,
  // as changed by tuning. `nmse` is the largest that any rank measured in the name's last
  // reduction; nothing else decides, so equal runs decide alike. A raised code stays until another
  // spec is requested.
  std::optional<CodecSpec> decide(const Operation& operation, const std::optional<CodecSpec>& asked,
                                  double nmse, const Fit& fit);
  // One sentence per change since the last call.
  std::vector<std::string> take_news() { return std::exchange(news_, {}); }

 private:
  struct Raised {
    std::optional<CodecSpec> asked;
    std::optional<CodecSpec> now;
  };
  std::map<Key, Raised> raised_;
  std::vector<std::string> news_;
};

}  // namespace qsgd
