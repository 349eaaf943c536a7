#include "collectives/exchange.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "collectives/schedule.h"
#include "common/error.h"

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

void send_receive(Transport& transport, Tag tag, int to, const void* data, size_t size_bytes,
                  int from, void* into, size_t into_bytes) {
  std::vector<RequestPtr> requests;
  if (into_bytes > 0) requests.push_back(transport.irecv(from, tag, into, into_bytes));
  if (size_bytes > 0) requests.push_back(transport.isend(to, tag, data, size_bytes));
  transport.wait(requests);
}

void barrier(Transport& transport) {
  const int size = transport.size(), rank = transport.rank();
  for (int hop = 1; hop < size; hop *= 2) {
    std::vector<RequestPtr> requests;
    requests.push_back(transport.irecv((rank - hop + size) % size, Tag::kData, nullptr, 0));
    requests.push_back(transport.isend((rank + hop) % size, Tag::kData, nullptr, 0));
    transport.wait(requests);
  }
}

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
