#include "collectives/recursive_doubling.h"

#include <cmath>

#include "collectives/algorithm.h"
#include "collectives/fold.h"
#include "collectives/packed.h"

namespace qsgd {

void recursive_doubling_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                                  const ReduceArgs& args) {
  Packed values(tensors, args, transport.size());
  const size_t bytes = values.count() * values.element();
  Fold fold(transport);
  fold.in(values.at(0), values.count(), args.dtype, args.op);
  if (!fold.surplus()) {
    KeptOnFailure<std::vector<char>> incoming;
    if (fold.ranks() > 1) incoming->resize(bytes);
    for (int hop = 1; hop < fold.ranks(); hop *= 2) {
      const int peer = transport.rank() ^ hop;
      std::vector<RequestPtr> requests;
      requests.push_back(transport.irecv(peer, Tag::kData, incoming->data(), bytes));
      requests.push_back(transport.isend(peer, Tag::kData, values.at(0), bytes));
      transport.wait(requests);
      reduce_ordered(values.at(0), incoming->data(), values.count(), args.dtype, args.op,
                     peer < transport.rank());
    }
  }
  fold.out(values.at(0), bytes);
  values.unpack();
}

const AlgorithmTraits& recursive_doubling_algorithm() {
  static constexpr AlgorithmTraits traits{
      "recursive_doubling", kExact,
      [](Communicator& c, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
         uint64_t /*seed*/) { recursive_doubling_allreduce(c.transport, tensors, args); },
      [](const Layout& layout, size_t count, double width) {
        const double rounds = std::log2(fold_ranks(layout.ranks));
        const double folds = fold_messages(layout.ranks),
                     bytes = static_cast<double>(count) * width;
        Load load;
        load.messages = rounds + folds;
        load.wire_bytes = (rounds + folds) * bytes;
        load.added_bytes = (rounds + folds / 2) * bytes;
        return load;
      }};
  return traits;
}

}  // namespace qsgd
