// Exact allreduce in log2(p) exchanges of complete messages: few steps, many bytes (Thakur,
// Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, IJHPCA
// 2005, sec. 4.1). Sums pair ranks that differ in one bit, lowest bit first.
#include <cmath>

#include "collectives/algorithm.h"
#include "collectives/exchange.h"
#include "collectives/fold.h"
#include "collectives/stream.h"

namespace qsgd {
namespace {

void recursive_doubling(Communicator& communicator, std::vector<ReduceTensor>& tensors,
                        const ReduceArgs& args, uint64_t /*seed*/) {
  Transport& transport = communicator.transport;
  Packed values(tensors, args, transport.size());
  const size_t bytes = values.count() * values.element();
  Fold fold(transport);
  fold.in(values.at(0), values.count(), args.dtype, args.op);
  if (!fold.surplus()) {
    KeptOnFailure<std::vector<char>> incoming;
    if (fold.ranks() > 1) incoming->resize(bytes);
    for (int hop = 1; hop < fold.ranks(); hop *= 2) {
      const int peer = transport.rank() ^ hop;
      send_receive(transport, Tag::kData, peer, values.at(0), bytes, peer, incoming->data(), bytes);
      reduce_ordered(values.at(0), incoming->data(), values.count(), args.dtype, args.op,
                     peer < transport.rank());
    }
  }
  fold.out(values.at(0), bytes);
  values.unpack();
}

Load recursive_doubling_load(const Layout& layout, size_t count, double width) {
  const double rounds = std::log2(fold_ranks(layout.ranks));
  const double folds = fold_messages(layout.ranks), bytes = static_cast<double>(count) * width;
  Load load;
  load.messages = rounds + folds;
  load.wire_bytes = (rounds + folds) * bytes;
  load.added_bytes = (rounds + folds / 2) * bytes;
  return load;
}

}  // namespace

const AlgorithmTraits& recursive_doubling_algorithm() {
  static constexpr AlgorithmTraits traits{"recursive_doubling", kExact, recursive_doubling,
                                          recursive_doubling_load};
  return traits;
}

}  // namespace qsgd
