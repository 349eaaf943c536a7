// What a code's settings mean: which are allowed, what they cost, how they read.
#include <string>

#include "common/error.h"
#include "quant/codec.h"

namespace qsgd {
namespace {

struct SchemeFacts {
  const char* name;
  int fewest_bits;
  int most_bits;
  int scales;  // of a bucket
  bool normed;
  bool rounds;
};

const SchemeFacts& facts_of(Scheme scheme) {
  static constexpr SchemeFacts kTable[kSchemes] = {
      {"qsgd", 2, 8, 1, true, true},        {"minmax", 1, 8, 2, false, true},
      {"nuqsgd", 2, 8, 1, true, true},      {"terngrad", 2, 2, 1, false, true},
      {"sign", 1, 1, 1, false, false},      {"topk", 32, 32, 0, false, false},
      {"float16", 16, 16, 0, false, false}, {"bfloat16", 16, 16, 0, false, false},
  };
  const auto index = static_cast<size_t>(scheme);
  if (index >= kSchemes) throw internal_error("scheme " + std::to_string(index) + " unknown");
  return kTable[index];
}

void check_bits(const CodecSpec& spec) {
  const SchemeFacts& facts = facts_of(spec.scheme);
  const std::string got = std::string(facts.name) + ": bits=" + std::to_string(spec.bits);
  if (facts.fewest_bits == facts.most_bits && spec.bits != facts.most_bits) {
    throw usage_error(got + ": the scheme has " + std::to_string(facts.most_bits) +
                      "; leave bits out");
  }
  if (spec.bits < facts.fewest_bits || spec.bits > facts.most_bits) {
    throw usage_error(got + ": choose " + std::to_string(facts.fewest_bits) + " to " +
                      std::to_string(facts.most_bits));
  }
}

void check_k(const CodecSpec& spec) {
  const std::string got = "k=" + std::to_string(spec.k);
  if (spec.scheme != Scheme::kTopK) {
    if (spec.k != 0) throw usage_error(got + ": only topk keeps k elements; leave k out");
  } else if (spec.k == 0 || spec.k > spec.bucket) {
    throw usage_error(got + ": choose how many elements of each bucket to keep, 1 to the " +
                      "bucket_size of " + std::to_string(spec.bucket));
  }
}

}  // namespace

size_t CodecSpec::scales(size_t count) const {
  return static_cast<size_t>(facts_of(scheme).scales) * buckets(count);
}

size_t CodecSpec::code_bytes(size_t count) const {
  switch (scheme) {
    case Scheme::kTopK: {  // a 16-bit place and a float32 value each
      const size_t rest = count % bucket;
      return (count / bucket * k + (rest < k ? rest : k)) * 6;
    }
    case Scheme::kFloat16:
    case Scheme::kBFloat16:
      return count * 2;
    default:
      return (count + kTile - 1) / kTile * static_cast<size_t>(kTile / 8 * bits);
  }
}

bool CodecSpec::operator==(const CodecSpec& o) const {
  return scheme == o.scheme && bits == o.bits && norm == o.norm && rounding == o.rounding &&
         bucket == o.bucket && k == o.k && contract == o.contract;
}

int fixed_bits(Scheme scheme) {
  const SchemeFacts& facts = facts_of(scheme);
  return facts.fewest_bits == facts.most_bits ? facts.most_bits : 0;
}

bool biased(const CodecSpec& spec) {
  switch (spec.scheme) {
    case Scheme::kTernGrad:  // what it clips
    case Scheme::kSign:
    case Scheme::kTopK:
      return true;
    case Scheme::kFloat16:
    case Scheme::kBFloat16:
      return false;
    default:
      return spec.rounding == Rounding::kNearest || spec.contract;
  }
}

std::string describe(const CodecSpec& spec) {
  const SchemeFacts& facts = facts_of(spec.scheme);
  std::string text = std::string(facts.name) + "(";
  if (facts.fewest_bits != facts.most_bits) text += "bits=" + std::to_string(spec.bits) + ", ";
  if (facts.normed) text += spec.norm == Norm::kMax ? "norm=max, " : "norm=l2, ";
  if (spec.scheme == Scheme::kTopK) text += "k=" + std::to_string(spec.k) + ", ";
  text += "bucket_size=" + std::to_string(spec.bucket);
  if (facts.rounds && spec.rounding == Rounding::kNearest) text += ", rounding=nearest";
  if (facts.rounds && spec.contract) text += ", contract=True";
  return text + ")";
}

void check(const CodecSpec& spec) {
  check_bits(spec);
  if (spec.bucket == 0 || spec.bucket % kTile != 0 || spec.bucket > kMaxBucket) {
    throw usage_error("bucket_size=" + std::to_string(spec.bucket) + ": choose a multiple of " +
                      std::to_string(kTile) + " up to " + std::to_string(kMaxBucket));
  }
  check_k(spec);
}

}  // namespace qsgd
