// Properties of the allreduce algorithms; docs/design.md has the steps to add one.
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
  kAuto,  // chooses one of the others
#define QSGD_ALGORITHM(algorithm, name) algorithm,
  QSGD_ALGORITHMS(QSGD_ALGORITHM)
#undef QSGD_ALGORITHM
};

struct Pipelining;
class NodeHalves;

// Alternative to shared memory for the exchange of tensors within a node.
class WithinNode {
 public:
  virtual ~WithinNode() = default;
  virtual std::unique_ptr<NodeHalves> cut(std::vector<ReduceTensor>& tensors,
                                          const ReduceArgs& args, int owners) = 0;
};

// What a collective may use on this rank. `node` is null without shared memory, `workers` with one
// thread. `pipelining`, if not null, sets the message length of compressed algorithms. `within`, if
// not null, exchanges the tensors within the node.
struct Communicator {
  Transport& transport;
  SharedNode* node = nullptr;
  Workers* workers = nullptr;
  Pipelining* pipelining = nullptr;
  WithinNode* within = nullptr;
};

enum AlgorithmFlags : unsigned {
  kExact = 0,
  kCompresses = 1,      // compresses, each tensor by its spec
  kNeedsNode = 2,       // needs memory shared by the ranks of a node
  kOneNode = 4,         // needs all ranks on one node
  kAcross = 8,          // sends and codes between nodes only
  kForComparison = 16,  // never chosen by the planner
  kLeaders = 32,        // one rank of each node sends
  kAnyPlace = 64,       // accesses tensors only through a SegmentCoder
  kCodesInputs = 128,   // codes inputs alone: every rank sums all ranks' codes
};

// Nodes with equal numbers of consecutive ranks.
struct Layout {
  int ranks = 1;
  int ranks_per_node = 1;
  int nodes() const { return ranks / ranks_per_node; }
};

// Work of one rank in an allreduce, in closed form, for the planner.
struct Load {
  double messages = 0;  // in sequence
  double wire_bytes = 0;
  double added_bytes = 0;
  // In elements:
  double encoded = 0;
  double decoded = 0;
  double decoded_and_added = 0;
  // Bytes of tensors reduced through a node's memory.
  double shared_bytes = 0;
};

struct AlgorithmTraits {
  const char* name;
  unsigned flags;
  void (*run)(Communicator& communicator, std::vector<ReduceTensor>& tensors,
              const ReduceArgs& args, uint64_t seed);
  // For `count` float32 elements, which take `width` bytes each on the wire, on at least 2 ranks.
  Load (*load)(const Layout& layout, size_t count, double width);

  bool has(AlgorithmFlags flag) const { return (flags & flag) != 0; }
};

// The algorithm of kAuto for ranks that share no memory.
Algorithm auto_among(int ranks, bool compressed);
// Throws an internal error for kAuto, which has no traits.
const AlgorithmTraits& traits_of(Algorithm algorithm);

// All algorithms, kAuto first.
std::vector<Algorithm> all_algorithms();
// The name in Python and in settings.
const char* name_of(Algorithm algorithm);
// Throws a usage error that lists the known names.
Algorithm parse_algorithm(const std::string& name);
inline bool is_compressed(Algorithm algorithm) {
  return algorithm != Algorithm::kAuto && traits_of(algorithm).has(kCompresses);
}

}  // namespace qsgd
