#include "collectives/exchange.h"

namespace qsgd {

void send_receive(Transport& transport, Tag tag, int to, const void* data, size_t size_bytes,
                  int from, void* into, size_t into_bytes) {
  std::vector<RequestPtr> requests;
  if (into_bytes > 0) requests.push_back(transport.irecv(from, tag, into, into_bytes));
  if (size_bytes > 0) requests.push_back(transport.isend(to, tag, data, size_bytes));
  transport.wait(requests);
}

}  // namespace qsgd
