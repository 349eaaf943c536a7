// All values go to the first rank, which adds them up in rank order and gives everybody the sum.
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/stream.h"

namespace qsgd {
namespace {

void through_first(Transport& transport, std::vector<ReduceTensor>& tensors,
                   const ReduceArgs& args) {
  Packed values(tensors, args, transport.size());
  const size_t bytes = values.count() * values.element();
  if (transport.rank() != 0) {
    RequestPtr sent = transport.isend(0, Tag::kData, values.at(0), bytes);
    transport.wait(sent);
    RequestPtr received = transport.irecv(0, Tag::kGather, values.at(0), bytes);
    transport.wait(received);
    return values.unpack();
  }
  KeptOnFailure<std::vector<char>> incoming;
  incoming->resize(bytes);
  std::vector<RequestPtr> sent;
  for (int peer = 1; peer < transport.size(); ++peer) {
    RequestPtr received = transport.irecv(peer, Tag::kData, incoming->data(), bytes);
    transport.wait(received);
    reduce_into(values.at(0), incoming->data(), values.count(), args.dtype, args.op);
  }
  for (int peer = 1; peer < transport.size(); ++peer) {
    sent.push_back(transport.isend(peer, Tag::kGather, values.at(0), bytes));
  }
  transport.wait(sent);
  values.unpack();
}

}  // namespace

const AlgorithmTraits& through_first_algorithm() {
  static constexpr AlgorithmTraits traits{
      "through_first", kExact,
      [](Communicator& c, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
         uint64_t /*seed*/) { through_first(c.transport, tensors, args); },
      [](const Layout& layout, size_t count, double width) {
        Load load;
        load.messages = 2.0 * (layout.ranks - 1);
        load.wire_bytes = load.messages * static_cast<double>(count) * width;
        load.added_bytes = load.wire_bytes / 2;
        return load;
      }};
  return traits;
}

}  // namespace qsgd
