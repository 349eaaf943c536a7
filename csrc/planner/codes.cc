#include "planner/codes.h"

#include <initializer_list>

#include "quant/code.h"

namespace qsgd {
namespace {

std::vector<CodecSpec> in_bits(CodecSpec spec, std::initializer_list<int> bits) {
  std::vector<CodecSpec> found;
  for (const int each : bits) {
    spec.bits = each;
    found.push_back(spec);
  }
  return found;
}

}  // namespace

std::vector<CodecSpec> usual_codes() { return in_bits({}, {8, 4, 2}); }

std::vector<CodecSpec> rotated_codes() {
  CodecSpec spec;
  spec.scheme = Scheme::kEden;
  return in_bits(spec, {4, 3});  // in 8, QSGD's error is as negligible, and it is faster
}

std::vector<CodecSpec> open_codes(const CodecSpec& spec, bool any_code) {
  std::vector<CodecSpec> found;
  // With fewer bits than a code's fewest_auto, training needs error feedback, which the user must
  // choose.
  for (const CodecSpec& each : in_bits(spec, {8, 4, 3})) {
    if (each.bits >= traits_of(spec.scheme).fewest_auto) found.push_back(each);
  }
  if (!any_code) return found;
  for (const CodecSpec& rotated : rotated_codes()) {
    found.push_back(spec);
    found.back().scheme = rotated.scheme;
    found.back().bits = rotated.bits;
  }
  return found;
}

}  // namespace qsgd
