#include "collectives/broadcast.h"

#include <algorithm>

#include "collectives/schedule.h"

namespace qsgd {
namespace {

// Positions are relative to the root.
struct Line {
  Line(const Transport& transport, int root)
      : size(transport.size()), root(root), position((transport.rank() - root + size) % size) {}
  int rank_at(int place) const { return (place + root) % size; }
  const int size, root, position;
};

void along_tree(Transport& transport, const Line& line, void* data, size_t size_bytes) {
  int reach = 1;
  while (reach < line.size && (line.position & reach) == 0) reach <<= 1;
  if (line.position != 0) {
    RequestPtr request =
        transport.irecv(line.rank_at(line.position - reach), Tag::kData, data, size_bytes);
    transport.wait(request);
  }
  std::vector<RequestPtr> sends;
  for (int hop = reach >> 1; hop > 0; hop >>= 1) {
    if (line.position + hop < line.size) {
      sends.push_back(
          transport.isend(line.rank_at(line.position + hop), Tag::kData, data, size_bytes));
    }
  }
  transport.wait(sends);
}

// Every rank forwards segments as they arrive: the root sends each byte once.
void along_chain(Transport& transport, const Line& line, char* data, size_t size_bytes) {
  constexpr size_t kAhead = 4;
  const size_t segments = (size_bytes + kSegmentBytes - 1) / kSegmentBytes;
  const auto bytes = [&](size_t k) {
    return std::min(kSegmentBytes, size_bytes - k * kSegmentBytes);
  };
  RequestPtr receives[kAhead];
  const auto ask = [&](size_t k) {
    if (line.position == 0 || k >= segments) return;
    receives[k % kAhead] = transport.irecv(line.rank_at(line.position - 1), Tag::kData,
                                           data + k * kSegmentBytes, bytes(k));
  };
  std::vector<RequestPtr> sends;
  for (size_t k = 0; k < kAhead; ++k) ask(k);
  for (size_t k = 0; k < segments; ++k) {
    if (line.position > 0) transport.wait(receives[k % kAhead]);
    ask(k + kAhead);
    if (line.position + 1 == line.size) continue;
    if (sends.size() == kAhead) transport.wait(sends);
    // The last send of each round must be matched by a receive before the next round begins, which
    // limits the number of unexpected messages.
    const Completion completion =
        sends.size() + 1 == kAhead ? Completion::kMatched : Completion::kSent;
    sends.push_back(transport.isend(line.rank_at(line.position + 1), Tag::kData,
                                    data + k * kSegmentBytes, bytes(k), completion));
  }
  transport.wait(sends);
}

}  // namespace

void broadcast(Transport& transport, void* data, size_t size_bytes, int root) {
  const Line line(transport, root);
  if (line.size == 1) return;
  // Number of bytes sent over one link in sequence: the tree sends all once per level; the chain
  // sends all once, plus a segment per rank.
  size_t levels = 0;
  while ((1 << levels) < line.size) ++levels;
  const size_t chain = size_bytes + static_cast<size_t>(line.size - 2) * kSegmentBytes;
  if (size_bytes > kSegmentBytes && chain < levels * size_bytes + kSegmentBytes) {
    return along_chain(transport, line, static_cast<char*>(data), size_bytes);
  }
  along_tree(transport, line, data, size_bytes);
}

}  // namespace qsgd
