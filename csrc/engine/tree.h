// The tree in which ranks exchange control messages: each rank communicates only with its parent
// and children, so the number of messages of rank 0 does not grow with the job.
//
// Rank 0 is the root. The first rank of each node is its leader and the parent of the others there,
// with which it shares memory; leaders have other leaders as children. Few ranks form a star around
// rank 0: an intermediate rank would cost more time than it saves rank 0.
#pragma once

#include <vector>

#include "engine/rank_set.h"

namespace qsgd {

class Tree {
 public:
  static constexpr int kFanOut = 8;  // leaders below a leader
  // Children on the same node; more are in several layers, to limit a rank's connections.
  static constexpr int kMostNear = 24;
  static constexpr int kStar = 1 + kMostNear + kFanOut;  // ranks; a leader has as many connections

  // `nodes` as in NodeFacts; null if the ranks of a node share no memory: each then counts as a
  // node. Each leader has `fan_out` leaders as children, for any number of ranks; 0: a star of few
  // ranks, else kFanOut.
  Tree(int rank, int size, const std::vector<std::vector<int>>* nodes, int fan_out);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool is_root() const { return parent_ < 0; }
  // Whether messages of other ranks pass through this rank, or reach it through another.
  bool is_intermediate() const { return intermediate_; }
  int parent() const { return parent_; }  // -1: root
  const std::vector<int>& children() const { return children_; }
  // This rank with all ranks below it; below(): the same for its n-th child.
  const RankSet& ours() const { return ours_; }
  const RankSet& below(size_t child) const { return below_[child]; }

 private:
  const int rank_;
  const int size_;
  int parent_ = -1;
  bool intermediate_ = false;
  std::vector<int> children_;
  RankSet ours_;
  std::vector<RankSet> below_;  // by child
};

}  // namespace qsgd
