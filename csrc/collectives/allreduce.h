// One entry to every allreduce: by name, or `auto`, which gives the same bits whatever a tensor is
// fused with and however large the message is.
#pragma once

#include <optional>
#include <vector>

#include "collectives/algorithm.h"
#include "quant/codec.h"

namespace qsgd {

// What this rank has handed to others.
inline BytesGiven bytes_given(const Communicator& c) {
  return {c.transport.bytes_sent(), c.node ? c.node->bytes_given() : 0};
}

// What `auto` stands for among so many ranks, which share memory as `node` says; null: not at all.
Algorithm resolve(int ranks, const SharedNode* node, bool compressed, Algorithm algorithm);
inline Algorithm resolve(const Communicator& c, bool compressed, Algorithm algorithm) {
  return resolve(c.transport.size(), c.node, compressed, algorithm);
}

// Throws a usage error when the ranks do not suit the algorithm, or whether to compress does not.
void check_fit(const Communicator& communicator, bool compressed, Algorithm algorithm);

// Those that suit the ranks, but for auto.
std::vector<Algorithm> fitting(const Communicator& communicator, bool compressed);

// Reduces the tensors together; every rank passes the same list and arguments. `compressed`, each
// tensor by its spec: exactly when the algorithm is such a one, or auto is to choose one. Throws a
// usage error when the ranks or the arguments do not suit the algorithm. Adasum has one algorithm
// of its own.
void allreduce(Communicator& communicator, std::vector<ReduceTensor>& tensors,
               const ReduceArgs& args, bool compressed, Algorithm algorithm, uint64_t seed);

// The same with one coding for all tensors, or none.
void allreduce(Communicator& communicator, std::vector<ReduceTensor>& tensors,
               const ReduceArgs& args, const std::optional<CodecSpec>& coding, Algorithm algorithm,
               uint64_t seed);

}  // namespace qsgd
