#include "collectives/barrier.h"

namespace qsgd {

void barrier(Transport& transport) {
  const int size = transport.size(), rank = transport.rank();
  for (int hop = 1; hop < size; hop *= 2) {
    std::vector<RequestPtr> requests;
    requests.push_back(transport.irecv((rank - hop + size) % size, Tag::kData, nullptr, 0));
    requests.push_back(transport.isend((rank + hop) % size, Tag::kData, nullptr, 0));
    transport.wait(requests);
  }
}

}  // namespace qsgd
