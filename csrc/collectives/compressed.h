// Common parts of the compressed collectives, besides their segments.
#pragma once

#include <vector>

#include "collectives/algorithm.h"
#include "collectives/segment_coder.h"
#include "collectives/windows.h"
#include "common/kept.h"

namespace qsgd {

// All other ranks, beginning with the next, so that not all ranks send to rank 0 at the same time.
std::vector<int> ranks_behind(int rank, int size);

// The reduction on a single rank: nothing is sent, so nothing is rounded.
void reduce_alone(SegmentCoder& coder, std::vector<ReduceTensor>& tensors, const ReduceArgs& args);

// The common place of all tensors.
inline Place* place_of(const std::vector<ReduceTensor>& tensors) {
  return tensors.empty() ? nullptr : tensors.front().place;
}

// Sets the terms of the windows' ranks, modulo the number of terms, to their oldest messages;
// returns false if one has not arrived.
bool collect(std::vector<ReceiveWindow>& windows, Terms& terms);
// Both for the oldest message of each window, which must have arrived.
void verify_all(const SegmentCoder& coder, const Segment& segment,
                std::vector<ReceiveWindow>& windows);
void release_all(std::vector<ReceiveWindow>& windows);

// The ranks that own what this rank contributes to: each gets its codes of the owner's segments,
// and returns the results.
class Owners {
 public:
  void add(Transport& transport, int rank, const Messages& segments, BufferPool& pool);

  // Codes this rank's input for the owner with the fewest segments so far; returns false if no
  // buffer is free or all is sent.
  bool send_input(SegmentCoder& coder);
  // Writes a result that has arrived to `out`; returns false if there is none.
  bool take_result(SegmentCoder& coder);
  // Whether everything was sent and all results were taken.
  bool done() const;
  // See SendWindow::drained().
  bool drained();

 private:
  struct Owner {
    int rank;
    Messages segments;
    SendWindow inputs;
    ReceiveWindow results;
    size_t sent = 0;
    size_t taken = 0;
  };
  std::vector<Owner> owners_;
};

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

// AlgorithmTraits::run of compressed allreduces. The Machine gets the chunks of all ranks or, if
// ranks do not own elements, a single chunk with all elements.
template <class Machine, bool kOwned = true>
void run_compressed(Communicator& communicator, std::vector<ReduceTensor>& tensors,
                    const ReduceArgs& args, uint64_t seed) {
  Transport& transport = communicator.transport;
  const int size = transport.size();
  const auto coder = make_coder(tensors, args, seed, transport.rank(), size, communicator.workers);
  if (size == 1) return reduce_alone(*coder, tensors, args);
  Pipelining* const pipelining = communicator.pipelining;
  const std::vector<Chunk> chunks =
      chunks_of(tensors, kOwned ? size : 1, segment_limit(pipelining));
  KeptOnFailure<BufferPool> pool{BufferPool(place_of(tensors))};
  Machine machine(transport, *coder, chunks, *pool);
  run_to_end(transport, machine);
  coder->finish();
  if (pipelining != nullptr) pipelining->peak_bytes = pool->size_bytes() + coder->scratch_bytes();
}

}  // namespace qsgd
