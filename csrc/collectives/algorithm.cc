#include "collectives/algorithm.h"

#include <array>

#include "common/error.h"

namespace qsgd {

#define QSGD_DECLARE(algorithm, name) const AlgorithmTraits& name##_algorithm();
QSGD_ALGORITHMS(QSGD_DECLARE)
#undef QSGD_DECLARE

namespace {

const auto& table() {
#define QSGD_ENTRY(algorithm, name) &name##_algorithm(),
  static const std::array traits{QSGD_ALGORITHMS(QSGD_ENTRY)};
#undef QSGD_ENTRY
  return traits;
}

}  // namespace

Algorithm auto_among(int ranks, bool compressed) {
  constexpr int kMostSraRanks = 64;  // beyond, messages cost more than a further quantisation
  if (!compressed) return Algorithm::kDirect;
  return ranks > kMostSraRanks ? Algorithm::kSra2d : Algorithm::kSra;
}

const AlgorithmTraits& traits_of(Algorithm algorithm) {
  const auto index = static_cast<size_t>(algorithm);
  if (index == 0 || index > table().size()) {
    throw internal_error("algorithm " + std::to_string(index) + " has no code");
  }
  return *table()[index - 1];
}

std::vector<Algorithm> all_algorithms() {
  std::vector<Algorithm> all;
  for (size_t i = 0; i <= table().size(); ++i) all.push_back(static_cast<Algorithm>(i));
  return all;
}

const char* name_of(Algorithm algorithm) {
  return algorithm == Algorithm::kAuto ? "auto" : traits_of(algorithm).name;
}

Algorithm parse_algorithm(const std::string& name) {
  std::string known;
  for (const Algorithm algorithm : all_algorithms()) {
    if (name == name_of(algorithm)) return algorithm;
    known += (known.empty() ? "" : ", ") + std::string(name_of(algorithm));
  }
  throw usage_error("unknown algorithm '" + name + "'; known are " + known);
}

}  // namespace qsgd
