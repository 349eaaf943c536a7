// What an algorithm of an allreduce consists of; docs/design.md has the steps to add one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/algorithm_list.h"
#include "collectives/reduce.h"
#include "common/workers.h"
#include "transport/shared_node.h"

namespace qsgd {

enum class Algorithm : uint8_t {
  kAuto,  // stands for one of the others
#define QSGD_ALGORITHM(algorithm, name) algorithm,
  QSGD_ALGORITHMS(QSGD_ALGORITHM)
#undef QSGD_ALGORITHM
};

struct Pipelining;
class NodeHalves;

// Exchanges tensors among the ranks of a node in another way than through their shared memory.
class WithinNode {
 public:
  virtual ~WithinNode() = default;
  virtual std::unique_ptr<NodeHalves> cut(std::vector<ReduceTensor>& tensors,
                                          const ReduceArgs& args, int owners) = 0;
};

// What a collective may use on this rank. `node` is null without shared memory, `workers` on one
// thread; `pipelining` says how compressed ones cut their messages, where somebody wants to.
// `within`, if not null, has the tensors.
struct Communicator {
  Transport& transport;
  SharedNode* node = nullptr;
  Workers* workers = nullptr;
  Pipelining* pipelining = nullptr;
  WithinNode* within = nullptr;
};

enum AlgorithmFlags : unsigned {
  kExact = 0,
  kCompresses = 1,      // every tensor by its spec
  kNeedsNode = 2,       // works through memory that the ranks of a node share
  kOneNode = 4,         // and there must be no other node
  kAcross = 8,          // messages go, and tensors are coded, between nodes only
  kForComparison = 16,  // never planned
  kLeaders = 32,        // and by one rank of each node
  kAnyPlace = 64,       // touches tensors through a SegmentCoder alone
};

// Nodes of equally many, consecutive ranks.
struct Layout {
  int ranks = 1;
  int ranks_per_node = 1;
  int nodes() const { return ranks / ranks_per_node; }
};

// What one allreduce asks of a rank, in closed form: for the planner.
struct Load {
  double messages = 0;  // one after the other
  double wire_bytes = 0;
  double added_bytes = 0;
  // Elements:
  double encoded = 0;
  double decoded = 0;
  double decoded_and_added = 0;
  // Of tensors that are reduced through a node's memory.
  double shared_bytes = 0;
};

struct AlgorithmTraits {
  const char* name;
  unsigned flags;
  void (*run)(Communicator& communicator, std::vector<ReduceTensor>& tensors,
              const ReduceArgs& args, uint64_t seed);
  // Of `count` float32, which take `width` bytes each on the wire; on at least 2 ranks.
  Load (*load)(const Layout& layout, size_t count, double width);

  bool has(AlgorithmFlags flag) const { return (flags & flag) != 0; }
};

// What kAuto stands for among ranks none of which share memory.
Algorithm auto_among(int ranks, bool compressed);
// Throws an internal error for kAuto, which has none.
const AlgorithmTraits& traits_of(Algorithm algorithm);

// All of them, kAuto first.
std::vector<Algorithm> all_algorithms();
// As Python spells it.
const char* name_of(Algorithm algorithm);
// Throws a usage error that lists what is known.
Algorithm parse_algorithm(const std::string& name);
inline bool is_compressed(Algorithm algorithm) {
  return algorithm != Algorithm::kAuto && traits_of(algorithm).has(kCompresses);
}

}  // namespace qsgd
