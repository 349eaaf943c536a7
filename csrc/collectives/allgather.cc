#include "collectives/allgather.h"

#include <cstring>

#include "collectives/exchange.h"

namespace qsgd {

void allgatherv(Transport& transport, const void* in, void* out, const std::vector<size_t>& sizes) {
  const std::vector<size_t> starts = starts_of(sizes);
  const auto rank = static_cast<size_t>(transport.rank());
  char* const to = static_cast<char*>(out);
  if (in != to + starts[rank] && sizes[rank] > 0) std::memcpy(to + starts[rank], in, sizes[rank]);
  std::vector<RequestPtr> requests;
  for_others(transport, [&](int peer) {
    const auto p = static_cast<size_t>(peer);
    if (sizes[p] == 0) return;
    requests.push_back(transport.irecv(peer, Tag::kData, to + starts[p], sizes[p]));
  });
  for_others(transport, [&](int peer) {
    if (sizes[rank] == 0) return;
    requests.push_back(transport.isend(peer, Tag::kData, in, sizes[rank]));
  });
  transport.wait(requests);
}

}  // namespace qsgd
