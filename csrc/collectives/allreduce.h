// Entry point of all allreduces: by an algorithm's name, or `auto`, which gives the same bits for
// any fusion and message size.
#pragma once

#include <optional>
#include <vector>

#include "collectives/algorithm.h"
#include "quant/codec.h"

namespace qsgd {

// Bytes that this rank has provided to others.
inline BytesGiven bytes_given(const Communicator& c) {
  return {c.transport.bytes_sent(), c.node ? c.node->bytes_given() : 0};
}

// The algorithm of `auto` for `ranks` ranks that share memory as in `node`; null: no shared memory.
Algorithm resolve(int ranks, const SharedNode* node, bool compressed, Algorithm algorithm);
inline Algorithm resolve(const Communicator& c, bool compressed, Algorithm algorithm) {
  return resolve(c.transport.size(), c.node, compressed, algorithm);
}

// Throws a usage error if the algorithm cannot run on these ranks, or does not match `compressed`.
void check_fit(const Communicator& communicator, bool compressed, Algorithm algorithm);

// The algorithms that can run on these ranks, without auto.
std::vector<Algorithm> fitting(const Communicator& communicator, bool compressed);

// Reduces the tensors together; every rank passes the same list and arguments. If `compressed`,
// each tensor is coded by its spec; the algorithm must be a compressed one, or auto. Throws a usage
// error if the ranks or the arguments do not suit the algorithm. Adasum has a separate algorithm.
void allreduce(Communicator& communicator, std::vector<ReduceTensor>& tensors,
               const ReduceArgs& args, bool compressed, Algorithm algorithm, uint64_t seed);

// The same with one code for all tensors, or none.
void allreduce(Communicator& communicator, std::vector<ReduceTensor>& tensors,
               const ReduceArgs& args, const std::optional<CodecSpec>& coding, Algorithm algorithm,
               uint64_t seed);

}  // namespace qsgd
