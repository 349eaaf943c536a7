#include "planner/plan.h"

#include <algorithm>

#include "planner/words.h"

namespace qsgd {
namespace {

constexpr size_t kLargest = size_t{1} << 30;
constexpr double kAsFast = 0.02;  // a difference that no measurement tells apart

std::string title(const CodecSpec& spec) {
  return spec.scheme == Scheme::kQsgd ? std::to_string(spec.bits) + " bit" : describe(spec);
}

bool pays(double coded_s, double other_s, double worth) { return coded_s < other_s * (1 - worth); }

// Most accurate first; ties are broken by all that distinguishes codes, so that order never counts.
bool finer(const CodecSpec& a, const CodecSpec& b) {
  const double a_bytes = a.mean_bytes(kMaxBucket), b_bytes = b.mean_bytes(kMaxBucket);
  if (a_bytes != b_bytes) return a_bytes > b_bytes;
  if (a.scheme != b.scheme) return a.scheme < b.scheme;
  return describe(a) < describe(b);
}

std::string verdict(const Machine& machine, const CodecSpec& spec, const PlanRequest& request,
                    bool compress) {
  const std::optional<size_t> least = threshold(machine, spec, request);
  const std::string size = least ? size_text(static_cast<double>(*least) * sizeof(float)) : "";
  if (compress) return "so compress; below " + size + " fp32 wins";
  if (!least) return "so fp32: the wire is too fast for this codec to pay at any size";
  return "so fp32; compressing pays from " + size;
}

std::string explain(const Machine& machine, size_t count, const CodecSpec& spec, double coded_s,
                    const PlanRequest& request, double exact_s, bool compress) {
  return title(spec) + ": " + size_text(static_cast<double>(count) * sizeof(float)) + " in " +
         time_text(coded_s) + ", fp32 " + time_text(exact_s) + ", " +
         verdict(machine, spec, request, compress);
}

}  // namespace

std::optional<size_t> threshold(const Machine& machine, const CodecSpec& spec,
                                const PlanRequest& request) {
  const auto wins = [&](size_t count) {
    return pays(fastest(machine, count, spec, request).seconds,
                fastest(machine, count, std::nullopt, request).seconds, request.worth);
  };
  if (!wins(kLargest)) return std::nullopt;
  size_t loses_at = 0, wins_at = kLargest;
  while (wins_at - loses_at > 1) {
    const size_t middle = loses_at + (wins_at - loses_at) / 2;
    (wins(middle) ? wins_at : loses_at) = middle;
  }
  return wins_at;
}

Way fastest(const Machine& machine, size_t count, const std::optional<CodecSpec>& spec,
            const PlanRequest& request) {
  const bool coded = spec.has_value();
  const Algorithm wanted = coded ? request.coded : request.exact;
  const bool is_open = request.any_algorithm && wanted == Algorithm::kAuto;
  Way best;
  for (const Algorithm algorithm :
       is_open ? machine.known(coded) : std::vector{machine.resolve(wanted, coded)}) {
    const double seconds = allreduce_s(machine, algorithm, count, spec);
    if (best.algorithm == Algorithm::kAuto || seconds < best.seconds * (1 - kAsFast)) {
      best = {algorithm, seconds};
    }
  }
  return best;
}

Plan choose(const Machine& machine, size_t count, const PlanRequest& request) {
  Plan plan;
  const Way exact = fastest(machine, count, std::nullopt, request);
  plan.algorithm = exact.algorithm;
  plan.exact_seconds = plan.seconds = exact.seconds;
  if (request.codecs.empty()) {
    plan.reason = "fp32 " + time_text(plan.exact_seconds) + ": no compression was asked for";
    return plan;
  }
  if (machine.ranks == 1) {
    plan.reason = "one rank sends nothing, so fp32";
    return plan;
  }
  std::vector<CodecSpec> codecs = request.codecs;
  std::sort(codecs.begin(), codecs.end(), finer);
  double least_s = 0;
  const CodecSpec* least = nullptr;
  for (const CodecSpec& spec : codecs) {
    const Way way = fastest(machine, count, spec, request);
    if (pays(way.seconds, plan.seconds, request.worth)) {
      plan.algorithm = way.algorithm;
      plan.spec = spec;
      plan.seconds = way.seconds;
    }
    if (least == nullptr || way.seconds < least_s) {
      least = &spec;
      least_s = way.seconds;
    }
  }
  plan.reason =
      plan.spec
          ? explain(machine, count, *plan.spec, plan.seconds, request, plan.exact_seconds, true)
          : explain(machine, count, *least, least_s, request, plan.exact_seconds, false);
  return plan;
}

}  // namespace qsgd
