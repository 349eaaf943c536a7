// Exchange of bytes between all ranks, without arithmetic.
#pragma once

#include <cstddef>
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

// Blocks until every rank has called it, in log2(p) steps (Hensgen, Finkel and Manber, Two
// algorithms for barrier synchronization, 1988).
void barrier(Transport& transport);

// Broadcast of bytes: along a binomial tree in log2(p) rounds; for large sizes in segments along a
// chain, which takes little longer than one transfer.
void broadcast(Transport& transport, void* data, size_t size_bytes, int root);

// `out` receives sizes[0] bytes of rank 0, then sizes[1] of rank 1, and so on; `sizes` is equal on
// all ranks. `in` may be this rank's part of `out`.
void allgatherv(Transport& transport, const void* in, void* out, const std::vector<size_t>& sizes);

// `in` holds send_sizes[r] bytes for each rank r, in rank order, and `out` receives
// receive_sizes[r] of each; the size that a sends to b must equal what b expects from a. The
// buffers must not overlap.
void alltoallv(Transport& transport, const void* in, const std::vector<size_t>& send_sizes,
               void* out, const std::vector<size_t>& receive_sizes);

}  // namespace qsgd
