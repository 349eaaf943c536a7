#include "collectives/hierarchical.h"

#include <algorithm>

#include "collectives/node_shards.h"
#include "transport/subset_transport.h"

namespace qsgd {
namespace {

bool nodes_are_equal(const SharedNode& node) {
  return std::all_of(node.nodes().begin(), node.nodes().end(), [&](const std::vector<int>& ranks) {
    return ranks.size() == node.nodes().front().size();
  });
}

// The ranks with the same shard as this rank, one per node.
std::vector<int> peers_across(const SharedNode& node) {
  std::vector<int> ranks;
  for (const std::vector<int>& other : node.nodes()) {
    ranks.push_back(other[static_cast<size_t>(node.rank())]);
  }
  return ranks;
}

void reduce_across(Communicator& communicator, std::vector<ReduceTensor>& shards,
                   const ReduceArgs& args, bool compressed, uint64_t seed) {
  const int size = communicator.transport.size();
  const bool average = args.op == ReduceOp::kAverage;
  SubsetTransport across(communicator.transport, peers_across(*communicator.node));
  // The divisor is the number of all ranks, not of those across.
  ReduceArgs sums = args;
  sums.prescale = 1;
  if (average) sums.op = ReduceOp::kSum;
  const bool coded = compressed && across.size() > 1;
  if (!coded) {
    sums.postscale = 1;
  } else if (average) {
    sums.postscale /= size;
  }
  Communicator between{across, nullptr, communicator.workers, communicator.pipelining};
  traits_of(auto_among(across.size(), coded)).run(between, shards, sums, seed);
  if (coded) return;
  for (ReduceTensor& shard : shards) {
    shard.result_finite = scale_copy(shard.out, shard.out, shard.count, args.dtype, args.postscale,
                                     average ? size : 1);
  }
}

// Sums within every node in the order of TreeSum, a shard per owner; reduces each shard across the
// nodes, in the order of their first ranks; then shares the shards within the node. If the
// algorithm compresses, messages between nodes are compressed, by SRA or, among many nodes, its
// two-dimensional form, and shards are cut between buckets.
template <const AlgorithmTraits& (*traits)()>
void run(Communicator& communicator, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
         uint64_t seed) {
  SharedNode& node = *communicator.node;
  const bool compressed = traits().has(kCompresses);
  const int owners = owners_of(node, traits());
  const std::unique_ptr<NodeHalves> halves =
      communicator.within != nullptr
          ? communicator.within->cut(tensors, args, owners)
          : std::make_unique<NodeShards>(node, tensors, args, compressed, owners);
  halves->reduce();
  if (node.rank() < owners) reduce_across(communicator, halves->mine(), args, compressed, seed);
  halves->share();
}

// Each owner reduces its shard across the nodes.
template <const AlgorithmTraits& (*traits)()>
Load load(const Layout& layout, size_t count, double width) {
  const int nodes = layout.nodes(), owners = traits().has(kLeaders) ? 1 : layout.ranks_per_node;
  Load load;
  if (nodes > 1) {
    const size_t shard = count / static_cast<size_t>(owners);
    load = traits_of(auto_among(nodes, traits().has(kCompresses))).load({nodes, 1}, shard, width);
  }
  load.shared_bytes = static_cast<double>(count) * sizeof(float);
  return load;
}

}  // namespace

int owners_of(const SharedNode& node, const AlgorithmTraits& algorithm) {
  return nodes_are_equal(node) && !algorithm.has(kLeaders) ? node.size() : 1;
}

Range hierarchical_shard(const SharedNode& node, int owners, size_t count, size_t granule,
                         uint32_t id) {
  return node.rank() < owners ? owned(count, granule, id, owners, node.rank()) : Range{};
}

Range hierarchical_owned(const SharedNode& node, int owners, size_t count, size_t granule,
                         uint32_t id) {
  if (node.rank() >= owners) return {};
  const Range shard = hierarchical_shard(node, owners, count, granule, id);
  const Range part =
      owned(shard.size(), granule, id, static_cast<int>(node.nodes().size()), node.node());
  return {shard.begin + part.begin, shard.begin + part.end};
}

const AlgorithmTraits& hierarchical_algorithm() {
  static constexpr AlgorithmTraits traits{"hierarchical", kNeedsNode | kAcross,
                                          run<hierarchical_algorithm>,
                                          load<hierarchical_algorithm>};
  return traits;
}

const AlgorithmTraits& leaders_algorithm() {
  static constexpr AlgorithmTraits traits{"leaders", kNeedsNode | kAcross | kLeaders,
                                          run<leaders_algorithm>, load<leaders_algorithm>};
  return traits;
}

const AlgorithmTraits& hierarchical_sra_algorithm() {
  static constexpr AlgorithmTraits traits{"hierarchical_sra", kCompresses | kNeedsNode | kAcross,
                                          run<hierarchical_sra_algorithm>,
                                          load<hierarchical_sra_algorithm>};
  return traits;
}

const AlgorithmTraits& leaders_sra_algorithm() {
  static constexpr AlgorithmTraits traits{"leaders_sra",
                                          kCompresses | kNeedsNode | kAcross | kLeaders,
                                          run<leaders_sra_algorithm>, load<leaders_sra_algorithm>};
  return traits;
}

}  // namespace qsgd
