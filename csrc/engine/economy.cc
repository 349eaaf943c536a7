#include "engine/economy.h"

namespace qsgd {

void Economy::set(Machine machine, PlanRequest request) {
  machine_ = std::move(machine);
  request_ = std::move(request);
}

std::optional<CodecSpec> Economy::decide(const std::optional<CodecSpec>& coding, size_t count) {
  if (!machine_ || !coding) return coding;
  const std::optional<size_t> least = least_count(*coding);
  return least && count >= *least ? coding : std::nullopt;
}

std::optional<size_t> Economy::least_count(const CodecSpec& spec) {
  for (const auto& [known, least] : known_) {
    if (known == spec) return least;
  }
  PlanRequest request = request_;
  request.codecs = {spec};
  const std::optional<size_t> least = threshold(*machine_, spec, request);
  known_.emplace_back(spec, least);
  const size_t example = least ? *least : size_t{1} << 24;
  news_.push_back("planner: " +
                  (least ? describe(spec) + " pays from " + std::to_string(*least) + " elements on"
                         : describe(spec) + " does not pay here, so gradients travel as float32") +
                  "; of " + std::to_string(example) +
                  " elements: " + choose(*machine_, example, request).reason);
  return least;
}

std::vector<std::string> Economy::take_news() {
  std::vector<std::string> news;
  news.swap(news_);
  return news;
}

int ranks_per_node(const SharedNode* node) {
  if (node == nullptr) return 1;
  const size_t most = node->nodes().front().size();
  int next = 0;
  for (const std::vector<int>& ranks : node->nodes()) {
    if (ranks.size() != most) return 1;
    for (const int rank : ranks) {
      if (rank != next++) return 1;
    }
  }
  return static_cast<int>(most);
}

}  // namespace qsgd
