// The two halves of an allreduce within a node, between which the sums may be reduced further.
#pragma once

#include <vector>

#include "collectives/schedule.h"
#include "collectives/stream.h"
#include "collectives/tree_sum.h"
#include "transport/shared_node.h"

namespace qsgd {

// Tensors partitioned among the first `owners` ranks of a node (all or one); between buckets if the
// following step compresses. The partition is a pure function, equal on every rank.
class NodeHalves {
 public:
  virtual ~NodeHalves() = default;
  // Sums the ranks' prescaled inputs, every owner its shard.
  virtual void reduce() = 0;
  // This rank's part of every tensor, with its sum as input and result. Only for owners.
  virtual std::vector<ReduceTensor>& mine() = 0;
  // Sends the results of all shards to every rank.
  virtual void share() = 0;
};

// The part of a tensor in a range, with its residual.
ReduceTensor shard_of(const ReduceTensor& tensor, const Range& range, size_t element);
// Adds the shard's coding statistics to the tensor.
void note_shard(const ReduceTensor& shard, ReduceTensor& tensor);

// Through the node's shared memory. Sums are in the order of TreeSum.
class NodeShards : public NodeHalves {
 public:
  NodeShards(SharedNode& node, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
             bool compressed, int owners);
  NodeShards(const NodeShards&) = delete;
  NodeShards& operator=(const NodeShards&) = delete;

  void reduce() override;
  std::vector<ReduceTensor>& mine() override;
  void share() override;

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
  std::vector<Stream> streams_;                    // of shards_
};

}  // namespace qsgd
