// The two halves of an allreduce within one node, which may do more with the sums in between.
#pragma once

#include <vector>

#include "collectives/stream.h"
#include "collectives/tree_sum.h"
#include "transport/shared_node.h"

namespace qsgd {

// Tensors cut among the first `owners` ranks of a node, between buckets where what follows is
// compressed; pure arithmetic, equal on every rank.
class NodeShards {
 public:
  NodeShards(SharedNode& node, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
             bool compressed, int owners);
  NodeShards(const NodeShards&) = delete;
  NodeShards& operator=(const NodeShards&) = delete;

  // Sums the ranks' prescaled inputs in the order of TreeSum, every owner its shard, into its
  // results.
  void reduce();
  // This rank's part of every tensor, in place in the results. Only for owners.
  std::vector<ReduceTensor>& mine();
  // Gives every rank the results of all shards.
  void share();

 private:
  bool owns() const { return node_.rank() < owners_; }
  size_t segments() const;
  size_t begin(size_t segment) const { return segment * most_; }
  size_t count(int owner, size_t segment) const;
  char* at(int rank, int owner, uint64_t turn) const;
  void wait_for_slot(uint64_t turn) const;
  void sum(size_t segment, uint64_t turn);
  void note_finite();

  SharedNode& node_;
  std::vector<ReduceTensor>& tensors_;
  const ReduceArgs args_;
  const int owners_;
  const size_t most_;  // elements of one shard in one slot
  TreeSum tree_;
  std::vector<std::vector<ReduceTensor>> shards_;  // by owner
  std::vector<Stream> streams_;                    // of these
};

}  // namespace qsgd
