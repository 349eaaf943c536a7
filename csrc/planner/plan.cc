#include "planner/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <tuple>

#include "quant/codec.h"

namespace qsgd {
namespace {

std::string number(double value, const char* unit) {
  char text[48];
  const int digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  std::snprintf(text, sizeof text, "%.*f %s", digits, value, unit);
  return text;
}

constexpr size_t kLargest = size_t{1} << 30;
constexpr double kAsFast = 0.02;  // a difference below the accuracy of measurements

std::string title(const CodecSpec& spec) {
  return spec.scheme == Scheme::kQsgd ? std::to_string(spec.bits) + " bit" : describe(spec);
}

bool pays(double coded_s, double other_s, double worth) { return coded_s < other_s * (1 - worth); }

// Buckets similar to gradients: most elements are small, a few large.
const std::vector<float>& sample() {
  static const std::vector<float> elements = [] {
    std::mt19937 bits(1);
    const auto uniform = [&] { return static_cast<float>(bits() >> 8) * 0x1p-24f; };
    std::vector<float> made(size_t{1} << 13);
    for (float& x : made) {
      const float bell = uniform() + uniform() - uniform() - uniform();
      x = bell / std::sqrt(uniform() + 0.02f);
    }
    return made;
  }();
  return elements;
}

// Relative squared error of a code on the sample; equal on all machines.
double loss(const CodecSpec& spec) {
  const std::vector<float>& x = sample();
  std::vector<float> scales(spec.scales(x.size())), decoded(x.size());
  std::vector<uint8_t> codes(spec.code_bytes(x.size()));
  const NoiseKey key{0, 0, 0, 0, Phase::kScatter};
  encode(x.data(), DType::kFloat32, x.size(), 0, spec, key, scales.data(), codes.data());
  decode(scales.data(), codes.data(), x.size(), spec, decoded.data(), DType::kFloat32);
  double lost = 0, all = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double wrong = double{decoded[i]} - double{x[i]};
    lost += wrong * wrong;
    all += double{x[i]} * double{x[i]};
  }
  return lost / all;
}

// Most accurate first; equal ones by their description, so that the order of the list is
// irrelevant.
std::vector<CodecSpec> by_loss(const std::vector<CodecSpec>& codecs) {
  std::vector<std::tuple<double, std::string, CodecSpec>> all;
  for (const CodecSpec& spec : codecs) all.emplace_back(loss(spec), describe(spec), spec);
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b));
  });
  std::vector<CodecSpec> sorted;
  for (const auto& each : all) sorted.push_back(std::get<2>(each));
  return sorted;
}

std::string verdict(const Machine& machine, size_t count, const CodecSpec& spec,
                    const PlanRequest& request, bool compress) {
  const std::optional<size_t> least = threshold(machine, spec, request);
  const std::string size = size_text(static_cast<double>(least.value_or(kLargest)) * sizeof(float));
  if (compress) {
    return "so compress" + (least ? ", as from " + size + " on" : "; at " + size + " fp32 wins");
  }
  if (!least) return "so fp32, as at " + size + ": the wire is too fast for this codec";
  return "so fp32" + (count < *least ? "; compressing pays from " + size : "");
}

std::string explain(const Machine& machine, size_t count, const CodecSpec& spec, double coded_s,
                    const PlanRequest& request, double exact_s, bool compress) {
  return title(spec) + ": " + size_text(static_cast<double>(count) * sizeof(float)) + " in " +
         time_text(coded_s) + ", fp32 " + time_text(exact_s) + ", " +
         verdict(machine, count, spec, request, compress);
}

}  // namespace

std::string time_text(double seconds) {
  if (seconds < 1e-3) return number(seconds * 1e6, "us");
  return seconds < 1 ? number(seconds * 1e3, "ms") : number(seconds, "s");
}

std::string size_text(double bytes) {
  if (bytes < 1024) return number(bytes, "B");
  return bytes < 1024 * 1024 ? number(bytes / 1024, "KiB") : number(bytes / 1024 / 1024, "MiB");
}

std::optional<size_t> threshold(const Machine& machine, const CodecSpec& spec,
                                const PlanRequest& request) {
  const auto wins = [&](size_t count) {
    return pays(fastest(machine, count, spec, request).seconds,
                fastest(machine, count, std::nullopt, request).seconds, request.worth);
  };
  if (!wins(kLargest)) return std::nullopt;
  size_t loses_at = 0, wins_at = kLargest;  // first halved until it loses
  while (wins_at - loses_at > 1) {
    const size_t middle = loses_at + (wins_at - loses_at) / 2;
    (wins(middle) ? wins_at : loses_at) = middle;
  }
  return wins_at;
}

Prediction fastest(const Machine& machine, size_t count, const std::optional<CodecSpec>& spec,
                   const PlanRequest& request) {
  const bool coded = spec.has_value();
  const Algorithm wanted = coded ? request.coded : request.exact;
  const bool is_open = request.any_algorithm && wanted == Algorithm::kAuto;
  Prediction best;
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
  const Prediction exact = fastest(machine, count, std::nullopt, request);
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
  const std::vector<CodecSpec> codecs = by_loss(request.codecs);
  double least_s = 0;
  const CodecSpec* least = nullptr;
  for (const CodecSpec& spec : codecs) {
    const Prediction prediction = fastest(machine, count, spec, request);
    if (pays(prediction.seconds, plan.seconds, request.worth)) {
      plan.algorithm = prediction.algorithm;
      plan.spec = spec;
      plan.seconds = prediction.seconds;
    }
    if (least == nullptr || prediction.seconds < least_s) {
      least = &spec;
      least_s = prediction.seconds;
    }
  }
  plan.reason =
      plan.spec
          ? explain(machine, count, *plan.spec, plan.seconds, request, plan.exact_seconds, true)
          : explain(machine, count, *least, least_s, request, plan.exact_seconds, false);
  return plan;
}

}  // namespace qsgd
