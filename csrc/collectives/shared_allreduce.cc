// Exact allreduce among the ranks of one node through shared memory, each element in the order of
// TreeSum. All ranks of the job must be on the node.
#include <algorithm>
#include <cstring>

#include "collectives/algorithm.h"
#include "collectives/schedule.h"
#include "collectives/stream.h"
#include "collectives/tree_sum.h"

namespace qsgd {
namespace {

using Flag = SharedNode::Flag;
using Lane = SharedNode::Lane;

// Up to this size every rank reads all slots, with one synchronisation. Two ranks do so for any
// size: with two phases, each would read as many bytes of the other.
constexpr size_t kOneShotBytes = size_t{16} << 10;

// Every rank posts its input, and sums all. A rank posts turn t after summing turn t - 2, for which
// it saw all others post t - 2, and hence sum t - 4: with four slots, no rank needs to check
// whether a slot is free.
static_assert(SharedNode::kSlots >= 4);
void one_shot(SharedNode& node, Stream& stream) {
  const size_t most = SharedNode::kSlotBytes / stream.element();
  const size_t segments = (stream.count() + most - 1) / most;
  const uint64_t first = node.reached(Flag::kPosted);
  const auto range = [&](size_t k) {
    return Range{k * most, std::min((k + 1) * most, stream.count())};
  };
  const auto post = [&](size_t k) {
    stream.load(range(k).begin, range(k).size(), node.slot(node.rank(), Lane::kOneShot, first + k));
    node.reach(Flag::kPosted, first + k + 1);
  };
  const bool one_pass = node.size() == 2 && stream.args().dtype == DType::kFloat32 &&
                        stream.args().op <= ReduceOp::kAverage;
  TreeSum sum(stream.args().dtype, stream.args().op, node.size());
  node.count_given(stream.size_bytes() * static_cast<size_t>(node.size() - 1));
  if (segments > 0) post(0);
  for (size_t k = 0; k < segments; ++k) {
    if (k + 1 < segments) post(k + 1);
    node.wait_all(Flag::kPosted, first + k + 1);
    const auto addend = [&](int rank) { return node.slot(rank, Lane::kOneShot, first + k); };
    if (one_pass) {
      stream.store_sum(range(k).begin, range(k).size(), reinterpret_cast<const float*>(addend(0)),
                       reinterpret_cast<const float*>(addend(1)));
      continue;
    }
    sum.run(range(k).size(), addend, [&](size_t at, size_t count, const void* block) {
      stream.store(range(k).begin + at, count, block);
    });
  }
}

// Each segment is partitioned among the ranks. A rank's slot contains its addends for the others
// and, in its own part, the sum. Three segments are in progress: one each being filled, summed and
// copied out.
class TwoPhase {
 public:
  TwoPhase(SharedNode& node, Stream& stream)
      : node_(node), stream_(stream), sum_(stream.args().dtype, stream.args().op, node.size()) {}

  void run() {
    const size_t segments = (stream_.count() + most_ - 1) / most_;
    for (size_t k = 0; k < segments + 2; ++k) {
      if (k < segments) fill(k);
      if (k >= 1 && k - 1 < segments) reduce(k - 1);
      if (k >= 2) copy(k - 2);
    }
  }

 private:
  Range part(size_t segment, int owner) const {
    const size_t begin = segment * most_;
    const Range cut = part_of(std::min(most_, stream_.count() - begin), 64, node_.size(), owner);
    return {begin + cut.begin, begin + cut.end};
  }
  char* at(int rank, size_t segment, const Range& range) const {
    return node_.slot(rank, Lane::kTwoPhase, first_ + segment) +
           (range.begin - segment * most_) * stream_.element();
  }

  void fill(size_t k) {
    const uint64_t turn = first_ + k;
    if (turn >= SharedNode::kSlots) node_.wait_all(Flag::kCopied, turn - SharedNode::kSlots + 1);
    for (int owner = 0; owner < node_.size(); ++owner) {
      const Range range = part(k, owner);
      stream_.load(range.begin, range.size(), at(node_.rank(), k, range));
      if (owner != node_.rank()) node_.count_given(range.size() * stream_.element());
    }
    node_.reach(Flag::kFilled, turn + 1);
  }

  void reduce(size_t k) {
    node_.wait_all(Flag::kFilled, first_ + k + 1);
    const Range range = part(k, node_.rank());
    node_.count_given(range.size() * static_cast<size_t>(node_.size() - 1) * stream_.element());
    sum_.run(
        range.size(), [&](int rank) { return at(rank, k, range); },
        [&](size_t offset, size_t count, void* block) {
          stream_.finish(block, count);
          std::memcpy(at(node_.rank(), k, range) + offset * stream_.element(), block,
                      count * stream_.element());
          stream_.place(range.begin + offset, count, block);
        });
    node_.reach(Flag::kReduced, first_ + k + 1);
  }

  // Begins with the next rank's part, so that not all read rank 0's at the same time.
  void copy(size_t k) {
    for (int hop = 1; hop < node_.size(); ++hop) {
      const int owner = (node_.rank() + hop) % node_.size();
      node_.wait(Flag::kReduced, owner, first_ + k + 1);
      const Range range = part(k, owner);
      stream_.place(range.begin, range.size(), at(owner, k, range));
    }
    node_.reach(Flag::kCopied, first_ + k + 1);
  }

  SharedNode& node_;
  Stream& stream_;
  TreeSum sum_;
  const size_t most_ = SharedNode::kSlotBytes / stream_.element();
  const uint64_t first_ = node_.reached(Flag::kFilled);
};

void shared(Communicator& communicator, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
            uint64_t /*seed*/) {
  SharedNode& node = *communicator.node;
  Stream stream(tensors, args, node.size());
  if (node.size() <= 2 || stream.size_bytes() <= kOneShotBytes) return one_shot(node, stream);
  TwoPhase(node, stream).run();
}

Load shared_load(const Layout& /*layout*/, size_t count, double width) {
  Load load;
  load.shared_bytes = static_cast<double>(count) * width;
  return load;
}

}  // namespace

const AlgorithmTraits& shared_algorithm() {
  static constexpr AlgorithmTraits traits{"shared", kNeedsNode | kOneNode, shared, shared_load};
  return traits;
}

}  // namespace qsgd
