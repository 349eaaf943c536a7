// Common parts of the compressed collectives, besides their segments.
#pragma once

#include <vector>

#include "collectives/segment_coder.h"
#include "collectives/windows.h"
#include "common/kept.h"

namespace qsgd {

// All other ranks, beginning with the next.
std::vector<int> ranks_behind(int rank, int size);

// The reduction on a single rank: nothing is sent, so nothing is rounded.
void reduce_alone(SegmentCoder& coder, std::vector<ReduceTensor>& tensors, const ReduceArgs& args);

// The common place of all tensors.
inline Place* place_of(const std::vector<ReduceTensor>& tensors) {
  return tensors.empty() ? nullptr : tensors.front().place;
}

// Runs a state machine with advance() and done() until it is done; throws if the job is aborted.
template <class Machine>
void run_to_end(Transport& transport, Machine& machine) {
  Backoff backoff;
  while (true) {
    if (machine.advance()) {
      backoff.reset();
    } else if (machine.done()) {
      return;
    } else {
      transport.abort_flag().check();
      backoff.pause();
    }
  }
}

// Common frame of compressed allreduces: cut(limit) returns what Machine sends, in segments of at
// most `limit` elements.
template <class Machine, class Cut>
void run_compressed(Transport& transport, std::vector<ReduceTensor>& tensors,
                    const ReduceArgs& args, uint64_t seed, Workers* workers, Pipelining* pipelining,
                    const Cut& cut) {
  const auto coder = make_coder(tensors, args, seed, transport.rank(), transport.size(), workers);
  if (transport.size() == 1) return reduce_alone(*coder, tensors, args);
  const auto segments = cut(segment_limit(pipelining));
  KeptOnFailure<BufferPool> pool{BufferPool(place_of(tensors))};
  Machine machine(transport, *coder, segments, *pool);
  run_to_end(transport, machine);
  coder->finish();
  if (pipelining != nullptr) pipelining->peak_bytes = pool->size_bytes() + coder->scratch_bytes();
}

}  // namespace qsgd
