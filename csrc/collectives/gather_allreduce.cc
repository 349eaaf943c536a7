#include "collectives/gather_allreduce.h"

#include <algorithm>

#include "collectives/exchange.h"
#include "collectives/tree_sum.h"
#include "common/kept.h"

namespace qsgd {

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

}  // namespace qsgd
