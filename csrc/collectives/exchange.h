// Concurrent messages between one rank and all others.
#pragma once

#include <vector>

#include "transport/transport.h"

namespace qsgd {

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
