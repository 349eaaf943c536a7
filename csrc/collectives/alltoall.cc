#include "collectives/alltoall.h"

#include <cstring>
#include <string>

#include "collectives/exchange.h"
#include "common/error.h"

namespace qsgd {

void alltoallv(Transport& transport, const void* in, const std::vector<size_t>& send_sizes,
               void* out, const std::vector<size_t>& receive_sizes) {
  const auto rank = static_cast<size_t>(transport.rank());
  if (send_sizes[rank] != receive_sizes[rank]) {
    throw usage_error("rank " + std::to_string(rank) + " sends itself " +
                      std::to_string(send_sizes[rank]) + " bytes and expects " +
                      std::to_string(receive_sizes[rank]) + "; both must be equal");
  }
  const std::vector<size_t> from = starts_of(send_sizes), to = starts_of(receive_sizes);
  const char* const source = static_cast<const char*>(in);
  char* const target = static_cast<char*>(out);
  std::vector<RequestPtr> requests;
  for_others(transport, [&](int peer) {
    const auto p = static_cast<size_t>(peer);
    if (receive_sizes[p] == 0) return;
    requests.push_back(transport.irecv(peer, Tag::kData, target + to[p], receive_sizes[p]));
  });
  for_others(transport, [&](int peer) {
    const auto p = static_cast<size_t>(peer);
    if (send_sizes[p] == 0) return;
    requests.push_back(transport.isend(peer, Tag::kData, source + from[p], send_sizes[p]));
  });
  if (send_sizes[rank] > 0) std::memcpy(target + to[rank], source + from[rank], send_sizes[rank]);
  transport.wait(requests);
}

}  // namespace qsgd
