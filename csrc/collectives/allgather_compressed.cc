// Compressed allreduce with the smallest error: every rank sends its codes to all others, and all
// decode and sum the same codes in rank order. Each element is coded once, but each rank sends p -
// 1 times the compressed size, so it only pays on few ranks.
//
// With w the normalised variance of the quantiser, the mean over p ranks of independent gradients
// has a normalised error of w. A rank adds its own decoded codes, not its input, because the other
// ranks have only these. Owner residuals are not used, because there are no owners.
#include "collectives/algorithm.h"
#include "collectives/compressed.h"

namespace qsgd {
namespace {

class CodesOfAll {
 public:
  CodesOfAll(Transport& transport, SegmentCoder& coder, const std::vector<Chunk>& chunks,
             BufferPool& pool)
      : coder_(coder),
        segments_(chunks.front()),
        rank_(transport.rank()),
        out_(transport, ranks_behind(transport.rank(), transport.size()), Tag::kData,
             messages_of(segments_), pool) {
    for (const int peer : ranks_behind(transport.rank(), transport.size())) {
      in_.emplace_back(transport, peer, Tag::kData, messages_of(segments_), pool);
    }
  }

  bool advance() { return sum_segment() || code_segment(); }
  bool done() { return summed_ == segments_.size() && out_.drained(); }

 private:
  bool code_segment() {
    if (coded_ == segments_.size()) return false;
    if (coded_ == summed_ + out_.depth()) return false;  // its buffer has codes not summed yet
    uint8_t* const message = out_.slot();
    if (message == nullptr) return false;
    coder_.contribute(segments_[coded_], {kOwn}, message);
    out_.send(segments_[coded_++]);
    return true;
  }

  bool sum_segment() {
    if (summed_ == coded_) return false;
    const Segment& segment = segments_[summed_];
    Terms terms(in_.size() + 1);
    terms[static_cast<size_t>(rank_)] = out_.sent(summed_);
    if (!collect(in_, terms)) return false;
    verify_all(coder_, segment, in_);
    coder_.deliver(segment, terms);
    release_all(in_);
    ++summed_;
    return true;
  }

  SegmentCoder& coder_;
  const Chunk& segments_;
  const int rank_;
  SendWindow out_;
  std::vector<ReceiveWindow> in_;
  size_t coded_ = 0;
  size_t summed_ = 0;
};

}  // namespace

const AlgorithmTraits& allgather_algorithm() {
  static constexpr AlgorithmTraits traits{
      "allgather", kCompresses | kCodesInputs, run_compressed<CodesOfAll, /*kOwned=*/false>,
      [](const Layout& layout, size_t count, double width) {
        const double p = layout.ranks, n = static_cast<double>(count);
        Load load;
        load.messages = p - 1;
        load.wire_bytes = (p - 1) * n * width;
        load.encoded = n;
        load.decoded_and_added = p * n;
        return load;
      }};
  return traits;
}

}  // namespace qsgd
