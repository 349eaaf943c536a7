// Concurrent messages between one rank and others.
#pragma once

#include <vector>

#include "transport/transport.h"

namespace qsgd {

// Sends to one rank while receiving from another or the same. Empty messages are not sent.
void send_receive(Transport& transport, Tag tag, int to, const void* data, size_t size_bytes,
                  int from, void* into, size_t into_bytes);

// Calls f(peer) for every other rank, beginning with the next, so that not all ranks send to rank 0
// at the same time.
template <class F>
void for_others(const Transport& transport, F&& f) {
  for (int hop = 1; hop < transport.size(); ++hop) {
    f((transport.rank() + hop) % transport.size());
  }
}

// The offset of each part in a buffer with consecutive parts of these sizes, and the end.
inline std::vector<size_t> starts_of(const std::vector<size_t>& sizes) {
  std::vector<size_t> starts{0};
  for (const size_t size : sizes) starts.push_back(starts.back() + size);
  return starts;
}

}  // namespace qsgd
