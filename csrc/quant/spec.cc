// Settings of codes: allowed values, sizes, description.
#include <string>

#include "common/error.h"
#include "quant/code.h"

namespace qsgd {
namespace {

void check_bits(const CodecSpec& spec) {
  const CodeTraits& traits = traits_of(spec.scheme);
  const std::string got = std::string(traits.name) + ": bits=" + std::to_string(spec.bits);
  if (!traits.has_choice() && spec.bits != traits.most_bits) {
    throw usage_error(got + ": the scheme has " + std::to_string(traits.most_bits) +
                      "; leave bits out");
  }
  if (spec.bits < traits.fewest_bits || spec.bits > traits.most_bits) {
    throw usage_error(got + ": choose " + std::to_string(traits.fewest_bits) + " to " +
                      std::to_string(traits.most_bits));
  }
}

void check_k(const CodecSpec& spec) {
  const std::string got = "k=" + std::to_string(spec.k);
  if (!traits_of(spec.scheme).has(kKeeps)) {
    if (spec.k != 0) throw usage_error(got + ": only topk keeps k elements; leave k out");
  } else if (spec.k == 0 || spec.k > spec.bucket) {
    throw usage_error(got + ": choose how many elements of each bucket to keep, 1 to the " +
                      "bucket_size of " + std::to_string(spec.bucket));
  }
}

}  // namespace

size_t CodecSpec::scales(size_t count) const {
  return static_cast<size_t>(traits_of(scheme).scales) * buckets(count);
}

size_t CodecSpec::code_bytes(size_t count) const {
  return code_of(scheme).code_bytes(*this, count);
}

double CodecSpec::mean_code_bytes(size_t count) const {
  return code_of(scheme).mean_code_bytes(*this, count);
}

double CodecSpec::mean_bytes(size_t count) const {
  return static_cast<double>(scales(count) * sizeof(float)) + mean_code_bytes(count);
}

bool CodecSpec::operator==(const CodecSpec& o) const {
  return scheme == o.scheme && bits == o.bits && norm == o.norm && rounding == o.rounding &&
         bucket == o.bucket && k == o.k && contract == o.contract;
}

bool biased(const CodecSpec& spec) {
  const CodeTraits& traits = traits_of(spec.scheme);
  const bool rounds_with_bias = spec.rounding == Rounding::kNearest || spec.contract;
  return traits.has(kBiased) || (traits.has(kRounds) && rounds_with_bias);
}

std::string describe(const CodecSpec& spec) {
  const CodeTraits& traits = traits_of(spec.scheme);
  std::string text = std::string(traits.name) + "(";
  if (traits.has_choice()) text += "bits=" + std::to_string(spec.bits) + ", ";
  if (traits.has(kNormed)) text += spec.norm == Norm::kMax ? "norm=max, " : "norm=l2, ";
  if (traits.has(kKeeps)) text += "k=" + std::to_string(spec.k) + ", ";
  text += "bucket_size=" + std::to_string(spec.bucket);
  if (traits.has(kRounds) && spec.rounding == Rounding::kNearest) text += ", rounding=nearest";
  if (traits.has(kRounds) && spec.contract) text += ", contract=True";
  return text + ")";
}

void check(const CodecSpec& spec) {
  check_bits(spec);
  if (spec.bucket == 0 || spec.bucket % kTile != 0 || spec.bucket > kMaxBucket) {
    throw usage_error("bucket_size=" + std::to_string(spec.bucket) + ": choose a multiple of " +
                      std::to_string(kTile) + " up to " + std::to_string(kMaxBucket));
  }
  if (traits_of(spec.scheme).has(kRotates) && (spec.bucket & (spec.bucket - 1)) != 0) {
    throw usage_error("bucket_size=" + std::to_string(spec.bucket) + ": " +
                      traits_of(spec.scheme).name + " needs a power of two from " +
                      std::to_string(kTile) + " to " + std::to_string(kMaxBucket));
  }
  check_k(spec);
}

}  // namespace qsgd
