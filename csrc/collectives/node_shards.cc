#include "collectives/node_shards.h"

#include <algorithm>

#include "collectives/schedule.h"

namespace qsgd {
namespace {

using Flag = SharedNode::Flag;
constexpr auto kLane = SharedNode::Lane::kTwoPhase;

// Complete cache lines, so that two owners never write to the same one.
size_t elements_per_owner(size_t element, int owners) {
  constexpr size_t kLineBytes = 64;
  return SharedNode::kSlotBytes / static_cast<size_t>(owners) / kLineBytes * kLineBytes / element;
}

}  // namespace

ReduceTensor shard_of(const ReduceTensor& tensor, const Range& range, size_t element) {
  ReduceTensor shard = tensor;
  shard.in = static_cast<const char*>(tensor.in) + range.begin * element;
  shard.out = static_cast<char*>(tensor.out) + range.begin * element;
  shard.count = range.size();
  shard.first = tensor.first + range.begin;
  if (tensor.residual != nullptr) shard.residual = tensor.residual + range.begin;
  return shard;
}

void note_shard(const ReduceTensor& shard, ReduceTensor& tensor) {
  tensor.result_finite &= shard.result_finite;
  tensor.coding_error += shard.coding_error;
  tensor.coded_energy += shard.coded_energy;
  tensor.coded_count += shard.coded_count;
  tensor.coded_bytes += shard.coded_bytes;
  tensor.coding_s += shard.coding_s;
}

NodeShards::NodeShards(SharedNode& node, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                       bool compressed, int owners)
    : node_(node),
      tensors_(tensors),
      args_(args),
      owners_(owners),
      most_(elements_per_owner(facts(args.dtype).size, owners)),
      tree_(args.dtype, args.op, node.size()),
      shards_(static_cast<size_t>(owners)) {
  const size_t element = facts(args.dtype).size;
  streams_.reserve(shards_.size());
  for (int owner = 0; owner < owners; ++owner) {
    std::vector<ReduceTensor>& shard = shards_[static_cast<size_t>(owner)];
    for (const ReduceTensor& tensor : tensors) {
      const size_t granule = compressed ? tensor.spec.bucket : 1;
      const Range range = owned(tensor.count, granule, tensor.id, owners, owner);
      shard.push_back(shard_of(tensor, range, element));
    }
    streams_.emplace_back(shard, args_, 1);
  }
}

size_t NodeShards::segments() const {
  size_t largest = 0;
  for (const Stream& stream : streams_) largest = std::max(largest, stream.count());
  return (largest + most_ - 1) / most_;
}

size_t NodeShards::count(int owner, size_t segment) const {
  const size_t whole = streams_[static_cast<size_t>(owner)].count();
  return std::min(most_, whole - std::min(whole, begin(segment)));
}

char* NodeShards::at(int rank, int owner, uint64_t turn) const {
  return node_.slot(rank, kLane, turn) +
         static_cast<size_t>(owner) * most_ * facts(args_.dtype).size;
}

void NodeShards::wait_for_slot(uint64_t turn) const {
  if (turn >= SharedNode::kSlots) node_.wait_all(Flag::kCopied, turn - SharedNode::kSlots + 1);
}

void NodeShards::sum(size_t segment, uint64_t turn) {
  node_.wait_all(Flag::kFilled, turn + 1);
  if (owns()) {
    Stream& stream = streams_[static_cast<size_t>(node_.rank())];
    tree_.run(
        count(node_.rank(), segment), [&](int rank) { return at(rank, node_.rank(), turn); },
        [&](size_t offset, size_t part, const void* block) {
          stream.place(begin(segment) + offset, part, block);
        });
  }
  node_.reach(Flag::kReduced, turn + 1);
  node_.reach(Flag::kCopied, turn + 1);
}

void NodeShards::reduce() {
  const size_t element = facts(args_.dtype).size;
  const uint64_t first = node_.reached(Flag::kFilled);
  const size_t total = segments();
  for (size_t k = 0; k < total + 1; ++k) {
    if (k < total) {
      wait_for_slot(first + k);
      for (int owner = 0; owner < owners_; ++owner) {
        streams_[static_cast<size_t>(owner)].load(begin(k), count(owner, k),
                                                  at(node_.rank(), owner, first + k));
        if (owner != node_.rank()) node_.count_given(count(owner, k) * element);
      }
      node_.reach(Flag::kFilled, first + k + 1);
    }
    if (k > 0) sum(k - 1, first + k - 1);
  }
  note_finite();
}

// Inputs were checked when read; results are checked when final.
void NodeShards::note_finite() {
  for (std::vector<ReduceTensor>& shard : shards_) {
    for (size_t t = 0; t < shard.size(); ++t) {
      tensors_[t].input_finite &= shard[t].input_finite;
      shard[t].result_finite = true;
      shard[t].in = shard[t].out;
    }
  }
}

std::vector<ReduceTensor>& NodeShards::mine() { return shards_[static_cast<size_t>(node_.rank())]; }

void NodeShards::share() {
  const uint64_t first = node_.reached(Flag::kFilled);
  const size_t total = segments();
  const int rank = node_.rank();
  const auto others = static_cast<size_t>(node_.size() - 1);
  for (size_t k = 0; k < total + 1; ++k) {
    if (k < total) {
      const uint64_t turn = first + k;
      wait_for_slot(turn);
      if (owns()) {
        streams_[static_cast<size_t>(rank)].fetch(begin(k), count(rank, k), at(rank, rank, turn));
        node_.count_given(count(rank, k) * others * facts(args_.dtype).size);
      }
      node_.reach(Flag::kFilled, turn + 1);
      node_.reach(Flag::kReduced, turn + 1);
    }
    if (k == 0) continue;
    const uint64_t turn = first + k - 1;
    for (int hop = 1; hop <= node_.size(); ++hop) {
      const int owner = (rank + hop) % node_.size();
      if (owner == rank || owner >= owners_) continue;
      node_.wait(Flag::kFilled, owner, turn + 1);
      streams_[static_cast<size_t>(owner)].place(begin(k - 1), count(owner, k - 1),
                                                 at(owner, owner, turn));
    }
    node_.reach(Flag::kCopied, turn + 1);
  }
  for (std::vector<ReduceTensor>& shard : shards_) {
    for (size_t t = 0; t < shard.size(); ++t) note_shard(shard[t], tensors_[t]);
  }
}

}  // namespace qsgd
