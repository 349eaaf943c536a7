// Exact allreduce by direct exchange: every rank sends its addends to each owner; owners sum and
// send the sums to all. 2 (p-1)/p of the bytes per rank, two steps of latency.
//
// Each element is summed in the order of TreeSum, so that its bits depend neither on its owner nor
// on fusion. Where messages cost more than their bytes, log2(p) steps are used instead: recursive
// doubling for small ones, or a gather to all ranks if these are few and not a power of two;
// halving for larger ones among many ranks. The bits are the same.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "collectives/algorithm.h"
#include "collectives/exchange.h"
#include "collectives/schedule.h"
#include "collectives/stream.h"
#include "collectives/tree_sum.h"
#include "common/kept.h"

namespace qsgd {
namespace {

// For small messages: every rank gathers all and sums them. log2(p) steps; each rank sends (p-1)
// times the message (Bruck et al., Efficient algorithms for all-to-all communications in multiport
// message-passing systems, 1997).
void gather_allreduce(Transport& transport, Stream& stream) {
  const int size = transport.size(), rank = transport.rank();
  const size_t bytes = stream.size_bytes();
  if (bytes == 0) return;
  // Place i has the message of rank (rank + i) % size.
  KeptOnFailure<std::vector<char>> places;
  places->resize(bytes * static_cast<size_t>(size));
  const auto place = [&](int i) { return places->data() + static_cast<size_t>(i) * bytes; };
  stream.load(0, stream.count(), place(0));
  for (int have = 1; have < size; have *= 2) {
    const size_t part = bytes * static_cast<size_t>(std::min(have, size - have));
    send_receive(transport, Tag::kData, (rank - have + size) % size, place(0), part,
                 (rank + have) % size, place(have), part);
  }
  TreeSum sum(stream.args().dtype, stream.args().op, size);
  sum.run(
      stream.count(), [&](int from) { return place((from - rank + size) % size); },
      [&](size_t at, size_t count, const void* block) { stream.store(at, count, block); });
}

constexpr size_t kGranule = 64;  // elements; keeps parts aligned
// Segments whose addends are in flight while an earlier one is summed.
constexpr size_t kTurnsAhead = 2;

// Buffers and requests of one segment in flight; every (kTurnsAhead + 1)-th segment reuses them.
struct Turn {
  std::vector<char> addends;   // of every rank, for the part owned by this rank
  std::vector<char> outgoing;  // for every rank, if they must be packed
  std::vector<char> sums;      // of every rank, if they must be unpacked
  std::vector<RequestPtr> receives, sends, gathers;
};

class Direct {
 public:
  Direct(Transport& transport, Stream& stream)
      : transport_(transport),
        stream_(stream),
        size_(transport.size()),
        rank_(transport.rank()),
        segment_(std::min(kSegmentBytes / stream.element(), largest_chunk())),
        sum_(stream.args().dtype, stream.args().op, size_) {}

  void run() {
    const size_t segments = (largest_chunk() + segment_ - 1) / segment_;
    for (size_t k = 0; k < segments + kTurnsAhead + 1; ++k) {
      if (k >= kTurnsAhead + 1) finish(k - kTurnsAhead - 1);
      if (k < segments) scatter(k);
      if (k >= kTurnsAhead && k - kTurnsAhead < segments) reduce(k - kTurnsAhead);
    }
  }

 private:
  Range chunk(int owner) const { return part_of(stream_.count(), kGranule, size_, owner); }
  size_t largest_chunk() const {
    size_t largest = 0;
    for (int owner = 0; owner < size_; ++owner) largest = std::max(largest, chunk(owner).size());
    return largest;
  }
  Range part(int owner, size_t segment) const {
    const Range whole = chunk(owner);
    const size_t begin = std::min(whole.end, whole.begin + segment * segment_);
    return {begin, std::min(whole.end, begin + segment_)};
  }
  Turn& turn(size_t segment) { return (*turns_)[segment % (kTurnsAhead + 1)]; }
  size_t bytes(const Range& range) const { return range.size() * stream_.element(); }
  // Place of rank `peer` in a buffer with one segment per rank.
  char* place(std::vector<char>& buffer, int peer) {
    buffer.resize(static_cast<size_t>(size_) * segment_ * stream_.element());
    return buffer.data() + static_cast<size_t>(peer) * segment_ * stream_.element();
  }
  // Sends this rank's addends to every owner, and posts receives for those of the others.
  void scatter(size_t k) {
    Turn& t = turn(k);
    const Range mine = part(rank_, k);
    for_others(transport_, [&](int peer) {
      if (mine.size() == 0) return;
      t.receives.push_back(transport_.irecv(peer, Tag::kData, place(t.addends, peer), bytes(mine)));
    });
    for_others(transport_, [&](int peer) {
      const Range range = part(peer, k);
      if (range.size() == 0) return;
      const void* from = stream_.input(range.begin, range.size());
      if (from != nullptr) {
        stream_.note_input(range.begin, range.size());
      } else {
        char* const packed = place(t.outgoing, peer);
        stream_.load(range.begin, range.size(), packed);
        from = packed;
      }
      t.sends.push_back(transport_.isend(peer, Tag::kData, from, bytes(range)));
    });
  }

  // Sums this rank's part, sends it to all, and posts receives for the other parts.
  void reduce(size_t k) {
    Turn& t = turn(k);
    const Range mine = part(rank_, k);
    if (mine.size() > 0) {
      char* const own = place(t.addends, rank_);
      stream_.load(mine.begin, mine.size(), own);
      transport_.wait(t.receives);
      sum_.run(
          mine.size(), [&](int from) { return place(t.addends, from); },
          [&](size_t at, size_t count, void* block) {
            stream_.finish(block, count);
            stream_.place(mine.begin + at, count, block);
            std::memcpy(own + at * stream_.element(), block, count * stream_.element());
          });
    }
    transport_.wait(t.sends);  // the sums may use the addends' buffers
    for_others(transport_, [&](int peer) {
      const Range range = part(peer, k);
      if (range.size() == 0) return;
      void* to = stream_.result(range.begin, range.size());
      if (to == nullptr) to = place(t.sums, peer);
      t.gathers.push_back(transport_.irecv(peer, Tag::kGather, to, bytes(range)));
    });
    for_others(transport_, [&](int peer) {
      if (mine.size() == 0) return;
      t.sends.push_back(transport_.isend(peer, Tag::kGather, place(t.addends, rank_), bytes(mine)));
    });
  }

  void finish(size_t k) {
    Turn& t = turn(k);
    transport_.wait(t.gathers);
    for_others(transport_, [&](int peer) {
      const Range range = part(peer, k);
      if (stream_.result(range.begin, range.size()) != nullptr) {
        stream_.note_result(range.begin, range.size());
      } else {
        stream_.place(range.begin, range.size(), place(t.sums, peer));
      }
    });
    transport_.wait(t.sends);
  }

  Transport& transport_;
  Stream& stream_;
  const int size_;
  const int rank_;
  const size_t segment_;
  TreeSum sum_;
  KeptOnFailure<std::vector<Turn>> turns_{std::vector<Turn>(kTurnsAhead + 1)};
};

// The way in which `ranks` ranks reduce `size_bytes` bytes.
enum class DirectWay { kDoubling, kGather, kHalving, kExchange };
DirectWay direct_way(int ranks, size_t size_bytes) {
  // Up to these sizes, bytes cost less than messages. Doubling sends sums, a gather all addends;
  // doubling and halving first send surplus ranks' addends, and finally their results.
  constexpr size_t kDoublingBytes = size_t{64} << 10;
  constexpr size_t kSmallBytes = size_t{16} << 10;
  constexpr size_t kGatheredBytes = size_t{128} << 10;
  constexpr int kHalvingRanks = 16;
  const bool is_power_of_two = (ranks & (ranks - 1)) == 0;
  if (is_power_of_two && size_bytes <= kDoublingBytes) return DirectWay::kDoubling;
  const auto p = static_cast<size_t>(ranks);
  if (size_bytes <= kSmallBytes) {
    return p * size_bytes <= kGatheredBytes ? DirectWay::kGather : DirectWay::kDoubling;
  }
  const bool parts_are_small = size_bytes <= p * kSmallBytes;
  return ranks >= kHalvingRanks && parts_are_small ? DirectWay::kHalving : DirectWay::kExchange;
}

void direct(Communicator& communicator, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
            uint64_t seed) {
  Transport& transport = communicator.transport;
  const int size = transport.size();
  Stream stream(tensors, args, size);
  if (size == 1) return gather_allreduce(transport, stream);
  switch (direct_way(size, stream.size_bytes())) {
    case DirectWay::kDoubling:
      return traits_of(Algorithm::kRecursiveDoubling).run(communicator, tensors, args, seed);
    case DirectWay::kGather:
      return gather_allreduce(transport, stream);
    case DirectWay::kHalving:
      return traits_of(Algorithm::kRabenseifner).run(communicator, tensors, args, seed);
    case DirectWay::kExchange:
      return Direct(transport, stream).run();
  }
}

Load direct_load(const Layout& layout, size_t count, double width) {
  const double p = layout.ranks, bytes = static_cast<double>(count) * width;
  Load load;
  switch (direct_way(layout.ranks, static_cast<size_t>(bytes))) {
    case DirectWay::kDoubling:
      return traits_of(Algorithm::kRecursiveDoubling).load(layout, count, width);
    case DirectWay::kGather:
      load.messages = std::ceil(std::log2(p));
      load.wire_bytes = load.added_bytes = (p - 1) * bytes;
      return load;
    case DirectWay::kHalving:
      return traits_of(Algorithm::kRabenseifner).load(layout, count, width);
    case DirectWay::kExchange:
      break;
  }
  load.messages = 2 * (p - 1);
  load.wire_bytes = 2 * (p - 1) / p * bytes;
  load.added_bytes = (p - 1) / p * bytes;
  return load;
}

}  // namespace

const AlgorithmTraits& direct_algorithm() {
  static constexpr AlgorithmTraits traits{"direct", kExact, direct, direct_load};
  return traits;
}

}  // namespace qsgd
