#include "collectives/allgather_compressed.h"

#include <algorithm>

#include "collectives/algorithm.h"
#include "collectives/compressed.h"
#include "collectives/windows.h"

namespace qsgd {
namespace {

class CodesOfAll {
 public:
  CodesOfAll(Transport& transport, SegmentCoder& coder, const Chunk& segments, BufferPool& pool)
      : coder_(coder),
        segments_(segments),
        rank_(transport.rank()),
        out_(transport, ranks_behind(transport.rank(), transport.size()), Tag::kData,
             messages_of(segments), kWindow, pool) {
    for (const int peer : ranks_behind(transport.rank(), transport.size())) {
      in_.emplace_back(transport, peer, Tag::kData, messages_of(segments), kWindow, pool);
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
    for (ReceiveWindow& from : in_) {
      const uint8_t* const message = from.ready();
      if (message == nullptr) return false;
      terms[static_cast<size_t>(from.peer())] = message;
    }
    for (const ReceiveWindow& from : in_) {
      coder_.verify(segment, terms[static_cast<size_t>(from.peer())], from.peer());
    }
    coder_.deliver(segment, terms);
    for (ReceiveWindow& from : in_) from.release();
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

void allgather_compressed(Transport& transport, std::vector<ReduceTensor>& tensors,
                          const ReduceArgs& args, uint64_t seed, Workers* workers,
                          Pipelining* pipelining) {
  run_compressed<CodesOfAll>(transport, tensors, args, seed, workers, pipelining,
                             [&](size_t limit) { return chunk_of(tensors, 1, 0, limit); });
}

const AlgorithmTraits& allgather_algorithm() {
  static constexpr AlgorithmTraits traits{
      "allgather", kCompresses | kCodesInputs,
      [](Communicator& c, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
         uint64_t seed) {
        allgather_compressed(c.transport, tensors, args, seed, c.workers, c.pipelining);
      },
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
