#include "collectives/allreduce.h"

#include <array>

#include "collectives/adasum.h"
#include "collectives/allgather_compressed.h"
#include "collectives/direct_allreduce.h"
#include "collectives/hierarchical.h"
#include "collectives/rabenseifner.h"
#include "collectives/recursive_doubling.h"
#include "collectives/requantizing_ring.h"
#include "collectives/ring_allreduce.h"
#include "collectives/shared_allreduce.h"
#include "collectives/sra2d_allreduce.h"
#include "collectives/sra_allreduce.h"
#include "common/error.h"

namespace qsgd {
namespace {

constexpr std::array<const char*, kAlgorithms> kNames = {"auto",
                                                         "direct",
                                                         "ring",
                                                         "recursive_doubling",
                                                         "rabenseifner",
                                                         "shared",
                                                         "hierarchical",
                                                         "sra",
                                                         "sra2d",
                                                         "allgather",
                                                         "requantizing_ring",
                                                         "hierarchical_sra"};

// Beyond, the second level of a two-dimensional exchange costs less than 64 messages per rank.
constexpr int kMostSraRanks = 64;

}  // namespace

bool needs_node(Algorithm algorithm) {
  return algorithm == Algorithm::kShared || algorithm == Algorithm::kHierarchical ||
         algorithm == Algorithm::kHierarchicalSra;
}

void check_fit(const Communicator& communicator, bool compressed, Algorithm algorithm) {
  const std::string name = name_of(algorithm);
  if (is_compressed(algorithm) != compressed) {
    throw usage_error("allreduce by '" + name + "' " +
                      (compressed ? "does not compress; choose a compressed algorithm or no coding"
                                  : "needs a coding; pass one or choose an exact algorithm"));
  }
  if (needs_node(algorithm) && communicator.node == nullptr) {
    throw usage_error("allreduce by '" + name + "' needs memory shared by the ranks of a node, " +
                      "which rank " + std::to_string(communicator.transport.rank()) +
                      " does not have; choose another or auto");
  }
  if (algorithm == Algorithm::kShared && communicator.node->nodes().size() != 1) {
    throw usage_error("allreduce by 'shared' is for ranks of one node, and there are " +
                      std::to_string(communicator.node->nodes().size()) +
                      "; choose hierarchical or auto");
  }
}

const char* name_of(Algorithm algorithm) { return kNames.at(static_cast<size_t>(algorithm)); }

Algorithm parse_algorithm(const std::string& name) {
  std::string known;
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Algorithm>(i);
    known += (known.empty() ? "" : ", ") + std::string(kNames[i]);
  }
  throw usage_error("unknown algorithm '" + name + "'; known are " + known);
}

Algorithm resolve(const Communicator& communicator, bool compressed, Algorithm algorithm) {
  const SharedNode* const node = communicator.node;
  const bool one_node = node != nullptr && node->nodes().size() == 1;
  // With no other node nothing would be coded, and error feedback never paid.
  if (algorithm == Algorithm::kHierarchicalSra && one_node) return Algorithm::kSra;
  if (algorithm != Algorithm::kAuto) return algorithm;
  const bool nodes_of_several =
      node != nullptr && !one_node &&
      static_cast<size_t>(communicator.transport.size()) > node->nodes().size();
  if (compressed) {
    if (nodes_of_several) return Algorithm::kHierarchicalSra;
    return communicator.transport.size() > kMostSraRanks ? Algorithm::kSra2d : Algorithm::kSra;
  }
  if (one_node) return Algorithm::kShared;
  return nodes_of_several ? Algorithm::kHierarchical : Algorithm::kDirect;
}

void allreduce(Communicator& communicator, std::vector<ReduceTensor>& tensors,
               const ReduceArgs& args, bool compressed, Algorithm algorithm, uint64_t seed) {
  if (args.op == ReduceOp::kAdasum) {
    check_adasum(args.dtype, compressed);
    return adasum_allreduce(communicator.transport, tensors, args);
  }
  const Algorithm chosen = resolve(communicator, compressed, algorithm);
  check_fit(communicator, compressed, chosen);
  Transport& transport = communicator.transport;
  switch (chosen) {
    case Algorithm::kDirect:
      return direct_allreduce(transport, tensors, args);
    case Algorithm::kRecursiveDoubling:
      return recursive_doubling_allreduce(transport, tensors, args);
    case Algorithm::kRabenseifner:
      return rabenseifner_allreduce(transport, tensors, args);
    case Algorithm::kHierarchical:
      return hierarchical_allreduce(communicator, tensors, args, false, seed);
    case Algorithm::kHierarchicalSra:
      return hierarchical_allreduce(communicator, tensors, args, true, seed);
    case Algorithm::kRing:
      return ring_allreduce(transport, tensors, args);
    case Algorithm::kShared:
      return shared_allreduce(*communicator.node, tensors, args);
    case Algorithm::kSra:
      return sra_allreduce(transport, tensors, args, seed, communicator.workers);
    case Algorithm::kSra2d:
      return sra2d_allreduce(transport, tensors, args, seed, communicator.workers);
    case Algorithm::kAllgather:
      return allgather_compressed(transport, tensors, args, seed, communicator.workers);
    case Algorithm::kRequantizingRing:
      return requantizing_ring(transport, tensors, args, seed, communicator.workers);
    case Algorithm::kAuto:
      break;
  }
  throw internal_error(std::string("allreduce by '") + name_of(chosen) + "' has no code");
}

void allreduce(Communicator& communicator, std::vector<ReduceTensor>& tensors,
               const ReduceArgs& args, const std::optional<CodecSpec>& coding, Algorithm algorithm,
               uint64_t seed) {
  if (coding) {
    for (ReduceTensor& tensor : tensors) tensor.spec = *coding;
  }
  allreduce(communicator, tensors, args, coding.has_value(), algorithm, seed);
}

}  // namespace qsgd
