// One entry to every allreduce: by name, or `auto`, which gives the same bits whatever a tensor is
// fused with and however large the message is.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "collectives/reduce.h"
#include "common/workers.h"
#include "quant/codec.h"
#include "transport/shared_node.h"

namespace qsgd {

enum class Algorithm : uint8_t {
  kAuto,
  kDirect,             // reduce-scatter by direct exchange, and allgather; small ones otherwise
  kRing,               // each hop adds
  kRecursiveDoubling,  // log2(p) whole messages
  kRabenseifner,       // recursive halving, then doubling
  kShared,             // one node, through shared memory
  kHierarchical,       // shared memory within nodes, direct across them
  kSra,                // the compressed ones, from here on
  kSra2d,
  kAllgather,
  kRequantizingRing,
  kHierarchicalSra,
};
constexpr int kAlgorithms = 12;

// As Python spells it.
const char* name_of(Algorithm algorithm);
// Throws a usage error that lists what is known.
Algorithm parse_algorithm(const std::string& name);
inline bool is_compressed(Algorithm algorithm) { return algorithm >= Algorithm::kSra; }

// What a collective may use on this rank. `node` is null without shared memory, `workers` on one
// thread.
struct Communicator {
  Transport& transport;
  SharedNode* node = nullptr;
  Workers* workers = nullptr;
};

// What this rank has handed to others.
inline BytesGiven bytes_given(const Communicator& c) {
  return {c.transport.bytes_sent(), c.node ? c.node->bytes_given() : 0};
}

// What `auto` stands for here. Depends on nothing but the ranks and their nodes.
Algorithm resolve(const Communicator& communicator, bool compressed, Algorithm algorithm);

// Whether it works through memory that ranks share.
bool needs_node(Algorithm algorithm);

// Throws a usage error when the ranks do not suit the algorithm, or whether to compress does not.
void check_fit(const Communicator& communicator, bool compressed, Algorithm algorithm);

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
