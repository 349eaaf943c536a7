#include "engine/budget.h"

#include "quant/code.h"

namespace qsgd {
namespace {

// Bits per element that rank a scheme among those with more bits.
int bits_of(const CodecSpec& spec) {
  const int worth = traits_of(spec.scheme).worth_bits;
  return worth != 0 ? worth : spec.bits;
}

// The next better code: QSGD with 2, 4 or 8 bits, then none.
std::optional<CodecSpec> with_more_bits(const CodecSpec& spec) {
  const bool keeps_scheme = traits_of(spec.scheme).has_choice();
  for (const int bits : {2, 4, 8}) {
    if (bits <= bits_of(spec)) continue;
    CodecSpec better = spec;
    if (!keeps_scheme) {
      better = CodecSpec();
      better.bucket = spec.bucket;
      better.contract = true;
    }
    better.bits = bits;
    return better;
  }
  return std::nullopt;
}

}  // namespace

std::optional<CodecSpec> NmseBudget::decide(const Operation& operation,
                                            const std::optional<CodecSpec>& asked, double nmse,
                                            const Fit& fit) {
  if (!asked || operation.coding->nmse_budget <= 0) return asked;
  auto it = raised_.find(operation.key());
  if (it != raised_.end() && it->second.asked != asked) {
    raised_.erase(it);
    return asked;
  }
  const std::optional<CodecSpec> now = it == raised_.end() ? asked : it->second.now;
  const double budget = operation.coding->nmse_budget;
  if (!now || !(nmse > budget)) return now;
  const std::optional<CodecSpec> better = fit(with_more_bits(*now));
  raised_[operation.key()] = {asked, better};
  news_.push_back("tensor '" + operation.name + "': NMSE " + format_nmse(nmse) + " with " +
                  describe(*now) + " exceeds the budget of " + format_nmse(budget) +
                  "; it is sent as " + (better ? describe(*better) : "float32") + " from now on");
  return better;
}

}  // namespace qsgd
