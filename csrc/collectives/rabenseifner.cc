// Exact allreduce by recursive halving, then doubling: the bytes of a ring in 2 log2(p) steps
// (Rabenseifner, Optimization of collective reduction operations, ICCS 2004). Sums pair ranks that
// differ in one bit, highest bit first.
#include <cmath>

#include "collectives/algorithm.h"
#include "collectives/exchange.h"
#include "collectives/fold.h"
#include "collectives/schedule.h"
#include "collectives/stream.h"

namespace qsgd {
namespace {

// A rank's place is its bit-reversed number: the first exchange, of the largest parts, is between
// the two halves of the places, and thus between neighbouring ranks, and sums are in the order of
// TreeSum.
class Halves {
 public:
  Halves(Transport& transport, Packed& values, const ReduceArgs& args, int ranks)
      : transport_(transport),
        values_(values),
        args_(args),
        ranks_(ranks),
        place_(reversed(transport.rank())) {}

  void run() {
    KeptOnFailure<std::vector<char>> incoming;
    for (int hop = ranks_ / 2; hop > 0; hop /= 2) halve(hop, *incoming);
    for (int hop = 1; hop < ranks_; hop *= 2) {
      const int peer = place_ ^ hop;
      const Range mine = group(place_, hop), theirs = group(peer, hop);
      exchange(reversed(peer), Tag::kGather, mine, values_.at(theirs.begin), theirs.size());
    }
  }

 private:
  // Converts a rank to its place, and a place to its rank.
  int reversed(int number) const {
    int result = 0;
    for (int bit = 1; bit < ranks_; bit *= 2) result = 2 * result + ((number & bit) != 0 ? 1 : 0);
    return result;
  }

  // The elements of the group of `width` places that contains `place`.
  Range group(int place, int width) const {
    const int first = place / width * width;
    return {part_of(values_.count(), 1, ranks_, first).begin,
            part_of(values_.count(), 1, ranks_, first + width - 1).end};
  }

  // Keeps this rank's half of the elements that its group of 2 `hop` ranks shares, and sends the
  // other.
  void halve(int hop, std::vector<char>& incoming) {
    const int peer = reversed(place_ ^ hop);
    const Range mine = group(place_, hop);
    if (incoming.empty()) incoming.resize(mine.size() * values_.element() + values_.element());
    exchange(peer, Tag::kData, group(place_ ^ hop, hop), incoming.data(), mine.size());
    reduce_ordered(values_.at(mine.begin), incoming.data(), mine.size(), args_.dtype, args_.op,
                   peer < transport_.rank());
  }

  void exchange(int peer, Tag tag, const Range& send, char* into, size_t count) {
    const size_t element = values_.element();
    send_receive(transport_, tag, peer, values_.at(send.begin), send.size() * element, peer, into,
                 count * element);
  }

  Transport& transport_;
  Packed& values_;
  const ReduceArgs& args_;
  const int ranks_;
  const int place_;
};

void rabenseifner(Communicator& communicator, std::vector<ReduceTensor>& tensors,
                  const ReduceArgs& args, uint64_t /*seed*/) {
  Transport& transport = communicator.transport;
  Packed values(tensors, args, transport.size());
  Fold fold(transport);
  fold.in(values.at(0), values.count(), args.dtype, args.op);
  if (!fold.surplus()) Halves(transport, values, args, fold.ranks()).run();
  fold.out(values.at(0), values.count() * values.element());
  values.unpack();
}

}  // namespace

const AlgorithmTraits& rabenseifner_algorithm() {
  static constexpr AlgorithmTraits traits{
      "rabenseifner", kExact, rabenseifner, [](const Layout& layout, size_t count, double width) {
        const double p = fold_ranks(layout.ranks), folds = fold_messages(layout.ranks);
        const double bytes = static_cast<double>(count) * width;
        Load load;
        load.messages = 2 * std::log2(p) + folds;
        load.wire_bytes = (2 * (p - 1) / p + folds) * bytes;
        load.added_bytes = ((p - 1) / p + folds / 2) * bytes;
        return load;
      }};
  return traits;
}

}  // namespace qsgd
