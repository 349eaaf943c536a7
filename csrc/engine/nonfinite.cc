#include "engine/nonfinite.h"

#include "common/listed.h"

namespace qsgd {
namespace {

std::string explain(const std::string& name, const std::vector<int>& from) {
  return "tensor '" + name + "' holds NaN or Inf after allreduce; " +
         (from.empty() ? "every rank's own values were finite, so the sum overflowed"
                       : "the values came from rank(s) " + listed(from)) +
         ". Lower the learning rate or scale the loss";
}

}  // namespace

std::vector<std::string> explain_nonfinite(Communicator& communicator,
                                           const std::vector<int>& names_of_ranks,
                                           const std::vector<std::string>& names,
                                           const std::vector<ReduceTensor>& tensors) {
  std::vector<std::string> messages(names.size());
  std::vector<size_t> bad;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].result_finite) bad.push_back(i);
  }
  if (bad.empty()) return messages;
  const auto ranks = static_cast<size_t>(communicator.transport.size());
  const auto rank = static_cast<size_t>(communicator.transport.rank());
  std::vector<int32_t> guilty(bad.size() * ranks, 0);
  for (size_t b = 0; b < bad.size(); ++b) {
    guilty[b * ranks + rank] = !tensors[bad[b]].input_finite;
  }
  std::vector<ReduceTensor> flags{{guilty.data(), guilty.data(), guilty.size(), 0, 0}};
  const ReduceArgs sum{DType::kInt32, ReduceOp::kSum, 1, 1};
  allreduce(communicator, flags, sum, std::nullopt, Algorithm::kAuto, 0);
  for (size_t b = 0; b < bad.size(); ++b) {
    std::vector<int> from;
    for (size_t r = 0; r < ranks; ++r) {
      if (guilty[b * ranks + r]) from.push_back(names_of_ranks[r]);
    }
    messages[bad[b]] = explain(names[bad[b]], from);
  }
  return messages;
}

}  // namespace qsgd
