#include "collectives/allreduce.h"

#include "collectives/adasum.h"
#include "common/error.h"

namespace qsgd {
namespace {

// Why the algorithm cannot run on these ranks; empty if it can.
std::string misfit(const Communicator& communicator, Algorithm algorithm) {
  const AlgorithmTraits& traits = traits_of(algorithm);
  if (traits.has(kNeedsNode) && communicator.node == nullptr) {
    return "needs memory shared by the ranks of a node, which rank " +
           std::to_string(communicator.transport.rank()) + " does not have; choose another or auto";
  }
  if (traits.has(kOneNode) && communicator.node->nodes().size() != 1) {
    return "is for ranks of one node, and there are " +
           std::to_string(communicator.node->nodes().size()) + "; choose hierarchical or auto";
  }
  return {};
}

}  // namespace

void check_fit(const Communicator& communicator, bool compressed, Algorithm algorithm) {
  const std::string name = name_of(algorithm);
  if (is_compressed(algorithm) != compressed) {
    throw usage_error("allreduce by '" + name + "' " +
                      (compressed ? "does not compress; choose a compressed algorithm or no coding"
                                  : "needs a coding; pass one or choose an exact algorithm"));
  }
  const std::string why = misfit(communicator, algorithm);
  if (!why.empty()) throw usage_error("allreduce by '" + name + "' " + why);
}

std::vector<Algorithm> fitting(const Communicator& communicator, bool compressed) {
  std::vector<Algorithm> found;
  for (const Algorithm algorithm : all_algorithms()) {
    if (algorithm == Algorithm::kAuto || is_compressed(algorithm) != compressed) continue;
    if (misfit(communicator, algorithm).empty()) found.push_back(algorithm);
  }
  return found;
}

Algorithm resolve(int ranks, const SharedNode* node, bool compressed, Algorithm algorithm) {
  const bool one_node = node != nullptr && node->nodes().size() == 1;
  // On one node nothing would be coded, and residuals would never be sent.
  const bool across = algorithm != Algorithm::kAuto && traits_of(algorithm).has(kAcross);
  if (across && is_compressed(algorithm) && one_node) return Algorithm::kSra;
  if (algorithm != Algorithm::kAuto) return algorithm;
  const bool nodes_of_several =
      node != nullptr && !one_node && static_cast<size_t>(ranks) > node->nodes().size();
  if (one_node && !compressed) return Algorithm::kShared;
  if (!nodes_of_several) return auto_among(ranks, compressed);
  return compressed ? Algorithm::kHierarchicalSra : Algorithm::kHierarchical;
}

void allreduce(Communicator& communicator, std::vector<ReduceTensor>& tensors,
               const ReduceArgs& args, bool compressed, Algorithm algorithm, uint64_t seed) {
  if (args.op == ReduceOp::kAdasum) {
    check_adasum(args.dtype, compressed);
    return adasum_allreduce(communicator.transport, tensors, args);
  }
  const Algorithm chosen = resolve(communicator, compressed, algorithm);
  check_fit(communicator, compressed, chosen);
  traits_of(chosen).run(communicator, tensors, args, seed);
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
