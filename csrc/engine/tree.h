// Who tells whom what is ready: each rank speaks with its parent and its children alone, so that
// what rank 0 reads and writes does not grow with the job.
//
// Rank 0 is the root. The first rank of each node leads it, and is the parent of the others there,
// with whom it shares memory; leaders have other leaders below them. Few ranks are a star around
// rank 0: a rank between would cost them more time than it saves rank 0.
#pragma once

#include <vector>

#include "engine/rank_set.h"

namespace qsgd {

class Tree {
 public:
  static constexpr int kFanOut = 8;  // leaders below a leader
  // Of its own node; more are in several layers, so that a rank has few connections in all.
  static constexpr int kMostNear = 24;
  static constexpr int kStar = 1 + kMostNear + kFanOut;  // ranks; as many connections as elsewhere

  // `nodes` as in NodeFacts; null where the ranks of a node share no memory: each is alone then.
  // `fan_out` leaders are below a leader, however few ranks there are; 0: a star where they are
  // few, and kFanOut where not.
  Tree(int rank, int size, const std::vector<std::vector<int>>* nodes, int fan_out);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool is_root() const { return parent_ < 0; }
  // Whether what other ranks say goes through this one, or comes to it through another.
  bool is_on_the_way() const { return on_the_way_; }
  int parent() const { return parent_; }  // -1 of the root
  const std::vector<int>& children() const { return children_; }
  // This rank and those below it; and the same of its n-th child.
  const RankSet& ours() const { return ours_; }
  const RankSet& below(size_t child) const { return below_[child]; }

 private:
  const int rank_;
  const int size_;
  int parent_ = -1;
  bool on_the_way_ = false;
  std::vector<int> children_;
  RankSet ours_;
  std::vector<RankSet> below_;  // by child
};

}  // namespace qsgd
