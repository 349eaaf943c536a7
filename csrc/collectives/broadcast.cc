#include "collectives/broadcast.h"

namespace qsgd {

void broadcast(Transport& transport, void* data, size_t size_bytes, int root) {
  const int size = transport.size();
  const auto rank_at = [&](int position) { return (position + root) % size; };
  const int position = (transport.rank() - root + size) % size;  // the root stands at 0
  int reach = 1;
  while (reach < size && (position & reach) == 0) reach <<= 1;
  if (position != 0) {
    RequestPtr request = transport.irecv(rank_at(position - reach), Tag::kData, data, size_bytes);
    transport.wait(request);
  }
  std::vector<RequestPtr> sends;
  for (int hop = reach >> 1; hop > 0; hop >>= 1) {
    if (position + hop < size) {
      sends.push_back(transport.isend(rank_at(position + hop), Tag::kData, data, size_bytes));
    }
  }
  transport.wait(sends);
}

}  // namespace qsgd
