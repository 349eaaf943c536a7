// Rank 0's decision whether coding a tensor saves time on this machine, if the job wants to know.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planner/plan.h"

namespace qsgd {

class Economy {
 public:
  // Every tensor travels as it was asked to, until a machine is given.
  void set(Machine machine, PlanRequest request);
  // `coding`, or nothing where `count` elements travel sooner uncompressed.
  std::optional<CodecSpec> decide(const std::optional<CodecSpec>& coding, size_t count);
  // One sentence for each code that was seen for the first time since the last call.
  std::vector<std::string> take_news();

 private:
  std::optional<size_t> least_count(const CodecSpec& spec);

  std::optional<Machine> machine_;
  PlanRequest request_;
  std::vector<std::pair<CodecSpec, std::optional<size_t>>> known_;  // from which count on it pays
  std::vector<std::string> news_;
};

// Consecutive ranks that share each node, as the planner counts them; 1 when nodes differ.
int ranks_per_node(const SharedNode* node);

}  // namespace qsgd
