#include "planner/plan.h"

#include <algorithm>
#include <cstdio>

namespace qsgd {
namespace {

constexpr size_t kLargest = size_t{1} << 30;

std::string number(double value, const char* unit) {
  char text[48];
  const int digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  std::snprintf(text, sizeof text, "%.*f %s", digits, value, unit);
  return text;
}

std::string time_text(double seconds) {
  if (seconds < 1e-3) return number(seconds * 1e6, "us");
  return seconds < 1 ? number(seconds * 1e3, "ms") : number(seconds, "s");
}

std::string size_text(double bytes) {
  if (bytes < 1024) return number(bytes, "B");
  return bytes < 1024 * 1024 ? number(bytes / 1024, "KiB") : number(bytes / 1024 / 1024, "MiB");
}

std::string title(const CodecSpec& spec) {
  return spec.scheme == Scheme::kQsgd ? std::to_string(spec.bits) + " bit" : describe(spec);
}

bool pays(double coded_s, double other_s, double worth) { return coded_s < other_s * (1 - worth); }

// Most accurate first; ties are broken by all that distinguishes codes, so that order never counts.
bool finer(const CodecSpec& a, const CodecSpec& b) {
  const size_t a_bytes = a.bytes(kMaxBucket), b_bytes = b.bytes(kMaxBucket);
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
    return pays(allreduce_s(machine, request.coded, count, spec),
                allreduce_s(machine, request.exact, count, std::nullopt), request.worth);
  };
  if (!wins(kLargest)) return std::nullopt;
  size_t loses_at = 0, wins_at = kLargest;
  while (wins_at - loses_at > 1) {
    const size_t middle = loses_at + (wins_at - loses_at) / 2;
    (wins(middle) ? wins_at : loses_at) = middle;
  }
  return wins_at;
}

Plan choose(const Machine& machine, size_t count, const PlanRequest& request) {
  Plan plan;
  plan.algorithm = machine.resolve(request.exact, false);
  plan.exact_seconds = plan.seconds = allreduce_s(machine, plan.algorithm, count, std::nullopt);
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
  double fastest_s = 0;
  const CodecSpec* fastest = nullptr;
  for (const CodecSpec& spec : codecs) {
    const double coded_s = allreduce_s(machine, request.coded, count, spec);
    if (pays(coded_s, plan.seconds, request.worth)) {
      plan.spec = spec;
      plan.seconds = coded_s;
    }
    if (fastest == nullptr || coded_s < fastest_s) {
      fastest = &spec;
      fastest_s = coded_s;
    }
  }
  if (plan.spec) plan.algorithm = machine.resolve(request.coded, true);
  plan.reason =
      plan.spec
          ? explain(machine, count, *plan.spec, plan.seconds, request, plan.exact_seconds, true)
          : explain(machine, count, *fastest, fastest_s, request, plan.exact_seconds, false);
  return plan;
}

}  // namespace qsgd
