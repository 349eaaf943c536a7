// Quantised scatter-reduce-allgather: the compressed allreduce with the smallest error that sends
// each element only twice. Every rank sends each owner its codes of the owner's elements; the owner
// sums in float32 in rank order and quantises again, and all ranks, including the owner, decode the
// owner's codes.
//
// With w the normalised variance of the quantiser, the mean over p ranks of independent gradients
// has a normalised error of w (p-1)/p + w (1 + w (p-1)/p), about 2 w. Each rank sends 2 (p-1)/p of
// the compressed size. The owner's residuals are those of owned() with `size` ranks.
#include "collectives/algorithm.h"
#include "collectives/compressed.h"

namespace qsgd {
namespace {

// Three activities, each of which continues whenever its messages and buffers allow.
class Sra {
 public:
  Sra(Transport& transport, SegmentCoder& coder, const std::vector<Chunk>& chunks, BufferPool& pool)
      : coder_(coder),
        mine_(chunks[static_cast<size_t>(transport.rank())]),
        ranks_(chunks.size()),
        results_out_(transport, ranks_behind(transport.rank(), transport.size()), Tag::kGather,
                     messages_of(mine_), pool) {
    for (const int peer : ranks_behind(transport.rank(), transport.size())) {
      inputs_in_.emplace_back(transport, peer, Tag::kData, messages_of(mine_), pool);
      owners_.add(transport, peer, messages_of(chunks[static_cast<size_t>(peer)]), pool);
    }
  }

  // Handles one message; returns false if none could be handled.
  bool advance() {
    return sum_segment() || owners_.send_input(coder_) || owners_.take_result(coder_);
  }

  bool done() {
    return summed_ == mine_.size() && owners_.done() && results_out_.drained() && owners_.drained();
  }

 private:
  // The owner's work, once all ranks' codes of a segment have arrived.
  bool sum_segment() {
    if (summed_ == mine_.size()) return false;
    const Segment& segment = mine_[summed_];
    Terms terms(ranks_, kOwn);
    if (!collect(inputs_in_, terms)) return false;
    uint8_t* const result = results_out_.slot();
    if (result == nullptr) return false;
    verify_all(coder_, segment, inputs_in_);
    coder_.conclude(segment, terms, result);
    results_out_.send(segment);
    release_all(inputs_in_);
    ++summed_;
    return true;
  }

  SegmentCoder& coder_;
  const Chunk& mine_;
  const size_t ranks_;
  std::vector<ReceiveWindow> inputs_in_;
  Owners owners_;
  SendWindow results_out_;
  size_t summed_ = 0;
};

}  // namespace

const AlgorithmTraits& sra_algorithm() {
  static constexpr AlgorithmTraits traits{
      "sra", kCompresses | kAnyPlace, run_compressed<Sra>,
      [](const Layout& layout, size_t count, double width) {
        const double p = layout.ranks, n = static_cast<double>(count);
        Load load;
        load.messages = 2 * (p - 1);
        load.wire_bytes = 2 * (p - 1) / p * n * width;
        load.encoded = n;  // the codes for the owners, and of the owner's sum
        load.decoded_and_added = (p - 1) / p * n;
        load.decoded = n;
        return load;
      }};
  return traits;
}

}  // namespace qsgd
