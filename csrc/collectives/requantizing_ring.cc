// A ring in which every hop decodes, adds and codes again. For comparison only: its error grows
// with the number of ranks, unlike that of SRA.
//
// With w the normalised variance of the quantiser, the mean over p ranks of independent gradients
// has a normalised error of about w (p + 1) / 2, growing like (1 + w)^p. Each rank sends
// 2 (p-1)/p of the compressed size, to the next rank only.
#include <algorithm>
#include <cstring>

#include "collectives/algorithm.h"
#include "collectives/compressed.h"

namespace qsgd {
namespace {

// A segment on this rank, `distance` hops from its first rank.
struct Move {
  int owner;
  int distance;
  const Segment* segment;
};

// A rank's moves in one turn round the ring, where the chunk that starts here is `first`'s. At time
// t it moves segment t of that chunk, segment t - 1 of the chunk that started one rank before, and
// so on: each message was sent one time earlier, and at most p - 1 messages wait between two ranks.
// The oldest is moved first, so that one message arrives for each that is sent.
std::vector<Move> moves_of(const std::vector<Chunk>& chunks, int first) {
  const int size = static_cast<int>(chunks.size());
  size_t longest = 0;
  for (const Chunk& chunk : chunks) longest = std::max(longest, chunk.size());
  std::vector<Move> moves;
  for (int time = 0; time < static_cast<int>(longest) + size - 1; ++time) {
    for (int distance = std::min(size - 1, time); distance >= 0; --distance) {
      const int owner = (first - distance + size) % size;
      const Chunk& chunk = chunks[static_cast<size_t>(owner)];
      const auto at = static_cast<size_t>(time - distance);
      if (at < chunk.size()) moves.push_back({owner, distance, &chunk[at]});
    }
  }
  return moves;
}

Messages arriving(const std::vector<Move>& moves) {
  Messages messages;
  for (const Move& move : moves) {
    if (move.distance > 0) messages.push_back(move.segment);
  }
  return messages;
}

Messages messages_of(const std::vector<Chunk>& chunks) {
  Messages messages;
  for (const Chunk& chunk : chunks) {
    for (const Segment& segment : chunk) messages.push_back(&segment);
  }
  return messages;
}

class Ring {
 public:
  Ring(Transport& transport, SegmentCoder& coder, const std::vector<Chunk>& chunks,
       BufferPool& pool)
      : coder_(coder),
        size_(transport.size()),
        left_((transport.rank() + size_ - 1) % size_),
        sums_(moves_of(chunks, left_)),
        results_(moves_of(chunks, transport.rank())),
        sums_in_(transport, left_, Tag::kData, arriving(sums_), pool, chunks.size()),
        results_in_(transport, left_, Tag::kGather, arriving(results_), pool, chunks.size()),
        sums_out_(transport, {right(transport)}, Tag::kData, messages_of(chunks), pool),
        results_out_(transport, {right(transport)}, Tag::kGather, messages_of(chunks), pool) {}

  bool advance() { return move_result() || move_sum(); }
  bool done() {
    return summed_ == sums_.size() && passed_ == results_.size() && sums_out_.drained() &&
           results_out_.drained();
  }

 private:
  int right(const Transport& transport) const { return (transport.rank() + 1) % size_; }

  // Adds this rank's input to a sum, and sends it on to the owner.
  bool move_sum() {
    if (summed_ == sums_.size()) return false;
    const Move& move = sums_[summed_];
    Terms terms{kOwn};
    if (move.distance > 0) {
      const uint8_t* const message = sums_in_.ready();
      if (message == nullptr) return false;
      terms.insert(terms.begin(), message);
    }
    const bool last = move.distance == size_ - 1;
    if (last && !own_result_is_next()) return false;
    SendWindow& out = last ? results_out_ : sums_out_;
    uint8_t* const to = out.slot();
    if (to == nullptr) return false;
    if (move.distance > 0) coder_.verify(*move.segment, terms.front(), left_);
    if (last) {
      coder_.conclude(*move.segment, terms, to);
      ++passed_;
    } else {
      coder_.contribute(*move.segment, terms, to);
    }
    out.send(*move.segment);
    if (move.distance > 0) sums_in_.release();
    ++summed_;
    return true;
  }

  bool own_result_is_next() const {
    return passed_ < results_.size() && results_[passed_].distance == 0;
  }

  // Decodes another owner's result and forwards its codes.
  bool move_result() {
    if (passed_ == results_.size() || own_result_is_next()) return false;
    const Move& move = results_[passed_];
    const bool last = move.distance == size_ - 1;
    const uint8_t* const message = results_in_.ready();
    uint8_t* const to = last ? nullptr : results_out_.slot();
    if (message == nullptr || (!last && to == nullptr)) return false;
    coder_.verify(*move.segment, message, left_);
    if (!last) {
      std::memcpy(to, message, move.segment->bytes);
      results_out_.send(*move.segment);
    }
    coder_.accept(*move.segment, message);
    results_in_.release();
    ++passed_;
    return true;
  }

  SegmentCoder& coder_;
  const int size_;
  const int left_;
  const std::vector<Move> sums_;
  const std::vector<Move> results_;
  ReceiveWindow sums_in_;
  ReceiveWindow results_in_;
  SendWindow sums_out_;
  SendWindow results_out_;
  size_t summed_ = 0;
  size_t passed_ = 0;
};

}  // namespace

const AlgorithmTraits& requantizing_ring_algorithm() {
  static constexpr AlgorithmTraits traits{
      "requantizing_ring", kCompresses | kForComparison | kAnyPlace, run_compressed<Ring>,
      [](const Layout& layout, size_t count, double width) {
        const double p = layout.ranks, n = static_cast<double>(count);
        Load load;
        load.messages = 2 * (p - 1);
        load.wire_bytes = 2 * (p - 1) / p * n * width;
        load.encoded = n;
        load.decoded_and_added = load.decoded = (p - 1) / p * n;
        return load;
      }};
  return traits;
}

}  // namespace qsgd
