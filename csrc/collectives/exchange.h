// Many messages at once, between one rank and all others.
#pragma once

#include <vector>

#include "transport/transport.h"

namespace qsgd {

// f(peer) for every other rank, the next one first, so that not all ranks turn to rank 0 at once.
template <class F>
void for_others(const Transport& transport, F&& f) {
  for (int hop = 1; hop < transport.size(); ++hop) {
    f((transport.rank() + hop) % transport.size());
  }
}

// Begin of every part of a buffer that holds parts of these sizes one behind the other, and its
// end.
inline std::vector<size_t> starts_of(const std::vector<size_t>& sizes) {
  std::vector<size_t> starts{0};
  for (const size_t size : sizes) starts.push_back(starts.back() + size);
  return starts;
}

}  // namespace qsgd
