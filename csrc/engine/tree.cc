#include "engine/tree.h"

#include <algorithm>
#include <string>

#include "common/error.h"

namespace qsgd {
namespace {

// Index of the parent of `place` if each has `fan_out` children.
size_t parent_place(size_t place, int fan_out) {
  return (place - 1) / static_cast<size_t>(fan_out);
}

// Parent of every rank; rank 0 is its own.
std::vector<int> parents(int size, const std::vector<std::vector<int>>& nodes, int fan_out) {
  std::vector<int> parent(static_cast<size_t>(size), 0);
  for (size_t n = 0; n < nodes.size(); ++n) {
    const std::vector<int>& ranks = nodes[n];
    const auto leader = static_cast<size_t>(ranks.front());
    if (n > 0) parent[leader] = nodes[parent_place(n, fan_out)].front();
    for (size_t i = 1; i < ranks.size(); ++i) {
      parent[static_cast<size_t>(ranks[i])] = ranks[parent_place(i, Tree::kMostNear)];
    }
  }
  return parent;
}

std::vector<std::vector<int>> each_alone(int size) {
  std::vector<std::vector<int>> nodes;
  for (int rank = 0; rank < size; ++rank) nodes.push_back({rank});
  return nodes;
}

}  // namespace

Tree::Tree(int rank, int size, const std::vector<std::vector<int>>* nodes, int fan_out)
    : rank_(rank), size_(size), ours_(RankSet::one(rank)) {
  if (fan_out < 0) throw usage_error("fan_out=" + std::to_string(fan_out) + "; use 0 or more");
  std::vector<int> parent(static_cast<size_t>(size), 0);
  if (fan_out > 0 || size > kStar) {
    std::vector<std::vector<int>> layout = nodes != nullptr ? *nodes : each_alone(size);
    std::sort(layout.begin(), layout.end());  // rank 0's node first
    parent = parents(size, layout, fan_out > 0 ? fan_out : kFanOut);
  }
  if (rank != 0) parent_ = parent[static_cast<size_t>(rank)];
  for (int r = 1; r < size; ++r) {
    if (parent[static_cast<size_t>(r)] == rank) children_.push_back(r);
  }
  below_.resize(children_.size());
  for (int r = 1; r < size; ++r) {
    int at = r, child = r;
    while (at != rank && at != 0) at = parent[static_cast<size_t>(child = at)];
    if (at != rank || r == rank) continue;
    const auto place = std::lower_bound(children_.begin(), children_.end(), child);
    below_[static_cast<size_t>(place - children_.begin())].add(r);
    ours_.add(r);
    intermediate_ |= rank != 0 || child != r;
  }
}

}  // namespace qsgd
