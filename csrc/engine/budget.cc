#include "engine/budget.h"

#include "engine/agreement.h"
#include "quant/code.h"

namespace qsgd {
namespace {

// Bits per element that stand for a scheme on the way up.
int bits_of(const CodecSpec& spec) {
  const int worth = traits_of(spec.scheme).worth_bits;
  return worth != 0 ? worth : spec.bits;
}

}  // namespace

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

std::optional<CodecSpec> NmseBudget::decide(const Submission& s, double nmse) {
  if (!s.coding || s.nmse_budget <= 0) return s.coding;
  auto it = raised_.find({s.set, s.name});
  if (it != raised_.end() && it->second.asked != s.coding) {
    raised_.erase(it);
    return s.coding;
  }
  const std::optional<CodecSpec> now = it == raised_.end() ? s.coding : it->second.now;
  if (!now || !(nmse > s.nmse_budget)) return now;
  const std::optional<CodecSpec> better = with_more_bits(*now);
  raised_[{s.set, s.name}] = {s.coding, better};
  news_.push_back("tensor '" + s.name + "': NMSE " + format_nmse(nmse) + " with " + describe(*now) +
                  " exceeds the budget of " + format_nmse(s.nmse_budget) + "; it travels as " +
                  (better ? describe(*better) : "float32") + " from now on");
  return better;
}

std::vector<std::string> NmseBudget::take_news() {
  std::vector<std::string> news;
  news.swap(news_);
  return news;
}

}  // namespace qsgd
