#include "planner/cost_model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <string>

#include "common/error.h"

namespace qsgd {
namespace {

constexpr double kLeastPart = 0.1;           // of the closed form: lower limit for extrapolations
constexpr double kSegmentBytes = 256 << 10;  // overlap: one segment is coded while one is in flight

// Communication and work overlap, except for the first segment.
double overlapped(double wire_s, double work_s, double bytes) {
  const double segments = std::max(1.0, std::ceil(bytes / kSegmentBytes));
  return std::max(wire_s, work_s) + std::min(wire_s, work_s) / segments;
}

// Bytes per element on the wire.
double width_of(size_t count, const std::optional<CodecSpec>& spec) {
  if (!spec) return sizeof(float);
  return count == 0 ? 0 : spec->mean_bytes(count) / static_cast<double>(count);
}

Load load_of(const Machine& m, const AlgorithmTraits& traits, size_t count,
             const std::optional<CodecSpec>& spec) {
  if (m.ranks == 1) return {};
  return traits.load({m.ranks, m.ranks_per_node}, count, width_of(count, spec));
}

// Time of adding and coding.
double work_s(const Machine& m, const Load& load, const std::optional<CodecSpec>& spec) {
  const double adding_s = load.added_bytes * m.add_s_per_byte;
  if (!spec) return adding_s;
  const CodecCost cost = m.codec(*spec);
  return adding_s + load.encoded * cost.encode_s + load.decoded * cost.decode_s +
         load.decoded_and_added * cost.decode_add_s;
}

}  // namespace

Link Machine::link() const {
  if (ranks <= 1) return within;
  const double near = static_cast<double>(ranks_per_node - 1) / (ranks - 1);
  return {near * within.alpha_s + (1 - near) * across.alpha_s,
          near * within.beta_s_per_byte + (1 - near) * across.beta_s_per_byte};
}

CodecCost Machine::codec(const CodecSpec& spec) const {
  const CodecCost* best = nullptr;
  const auto distance = [&](const CodecCost& c) { return std::abs(c.spec.bits - spec.bits); };
  for (const CodecCost& c : codecs) {
    if (c.spec.scheme != spec.scheme) continue;
    if (best == nullptr || distance(c) < distance(*best)) best = &c;
  }
  if (best != nullptr) return *best;
  CodecCost slowest;
  for (const CodecCost& c : codecs) {
    slowest.encode_s = std::max(slowest.encode_s, c.encode_s);
    slowest.decode_s = std::max(slowest.decode_s, c.decode_s);
    slowest.decode_add_s = std::max(slowest.decode_add_s, c.decode_add_s);
  }
  return slowest;
}

void check(const Machine& m) {
  const auto require = [](bool holds, const std::string& field, const auto& value,
                          const char* range) {
    if (holds) return;
    std::ostringstream text;
    text << "measured machine: " << field << " is " << value << ", expected " << range
         << "; measure it again";
    throw usage_error(text.str());
  };
  require(m.ranks >= 1, "ranks", m.ranks, "at least 1");
  require(m.ranks_per_node >= 1 && m.ranks % m.ranks_per_node == 0, "ranks_per_node",
          m.ranks_per_node, "a divisor of ranks");
  const auto require_time = [&](const char* field, double value) {
    require(std::isfinite(value) && value >= 0, field, value, "a time of 0 s or more");
  };
  for (const Link* link : {&m.within, &m.across, &m.shared}) {
    require_time("alpha_s", link->alpha_s);
    require_time("beta_s_per_byte", link->beta_s_per_byte);
  }
  require_time("add_s_per_byte", m.add_s_per_byte);
  for (const CodecCost& c : m.codecs) {
    require_time("encode_s", c.encode_s);
    require_time("decode_s", c.decode_s);
    require_time("decode_add_s", c.decode_add_s);
  }
  for (const Observation& o : m.observed) {
    const std::string field = std::string("observed ") + name_of(o.algorithm);
    require(std::isfinite(o.seconds) && o.seconds > 0, field + " seconds", o.seconds,
            "a time of more than 0 s");
    require(o.count > 0, field + " count", o.count, "at least one element");
    require(is_compressed(o.algorithm) == o.spec.has_value(), field + " code",
            o.spec.has_value() ? "given" : "none", "a code only where it compresses");
  }
}

std::vector<Algorithm> Machine::known(bool compressed) const {
  std::vector<Algorithm> found;
  for (const Observation& o : observed) {
    if (o.spec.has_value() != compressed) continue;
    if (std::find(found.begin(), found.end(), o.algorithm) == found.end()) {
      found.push_back(o.algorithm);
    }
  }
  if (found.empty()) found.push_back(compressed ? coded : exact);
  return found;
}

namespace {

// Prediction by the closed form only.
double modelled_s(const Machine& m, Algorithm algorithm, size_t count,
                  const std::optional<CodecSpec>& spec) {
  const AlgorithmTraits& traits = traits_of(algorithm);
  const Load load = load_of(m, traits, count, spec);
  Link link = traits.has(kAcross) ? m.across : m.link();
  if (traits.has(kLeaders)) link.beta_s_per_byte /= m.ranks_per_node;  // a leader does not share it
  const double shared_s = traits.has(kNeedsNode) ? m.shared(1, load.shared_bytes) : 0;
  return shared_s + load.messages * link.alpha_s +
         overlapped(load.wire_bytes * link.beta_s_per_byte, work_s(m, load, spec), load.wire_bytes);
}

// Difference of two codes: the scheme counts more than the bits.
int distance(const CodecSpec& a, const CodecSpec& b) {
  return (a.scheme == b.scheme ? 0 : 100) + std::abs(a.bits - b.bits);
}

// Observations of the algorithm with the most similar code, by size; of two codes that are equally
// similar, those of the first: a line through both would have two times for one size.
std::vector<const Observation*> observations(const Machine& m, Algorithm algorithm,
                                             const std::optional<CodecSpec>& spec) {
  std::vector<const Observation*> found;
  int nearest = std::numeric_limits<int>::max();
  for (const Observation& o : m.observed) {
    if (o.algorithm != algorithm || o.spec.has_value() != spec.has_value()) continue;
    const int away = spec ? distance(*o.spec, *spec) : 0;
    if (away > nearest) continue;
    if (away < nearest) found.clear();
    if (!found.empty() && !(found.front()->spec == o.spec)) continue;
    nearest = away;
    found.push_back(&o);
  }
  std::sort(found.begin(), found.end(),
            [](const Observation* a, const Observation* b) { return a->count < b->count; });
  return found;
}

// Measured time minus the closed form's, by size.
struct Excess {
  double count;
  double seconds;
};

std::vector<Excess> excesses(const Machine& m, Algorithm algorithm,
                             const std::optional<CodecSpec>& spec) {
  std::vector<Excess> found;
  for (const Observation* o : observations(m, algorithm, spec)) {
    found.push_back(
        {static_cast<double>(o->count), o->seconds - modelled_s(m, algorithm, o->count, o->spec)});
  }
  return found;
}

// Interpolates linearly between the observed sizes; beyond them extrapolates the last line, below
// them uses the first value.
double excess_s(const std::vector<Excess>& seen, double count) {
  if (seen.empty()) return 0;
  if (seen.size() == 1 || count <= seen.front().count) return seen.front().seconds;
  const auto high = std::find_if(seen.begin() + 1, seen.end() - 1,
                                 [&](const Excess& e) { return e.count >= count; });
  const auto low = high - 1;
  const double part = (count - low->count) / (high->count - low->count);
  return low->seconds + part * (high->seconds - low->seconds);
}

double predicted_s(const Machine& m, Algorithm algorithm, size_t count,
                   const std::optional<CodecSpec>& spec, bool optimistic) {
  if (m.ranks == 1) return 0;
  const Algorithm chosen = m.resolve(algorithm, spec.has_value());
  const double form_s = modelled_s(m, chosen, count, spec);
  const std::vector<Excess> seen = excesses(m, chosen, spec);
  double excess = excess_s(seen, static_cast<double>(count));
  if (optimistic && !seen.empty()) excess = std::min(excess, seen.back().seconds);
  return std::max(form_s + excess, form_s * kLeastPart);
}

}  // namespace

double allreduce_s(const Machine& m, Algorithm algorithm, size_t count,
                   const std::optional<CodecSpec>& spec) {
  return predicted_s(m, algorithm, count, spec, /*optimistic=*/false);
}

double optimistic_s(const Machine& m, Algorithm algorithm, size_t count,
                    const std::optional<CodecSpec>& spec) {
  return predicted_s(m, algorithm, count, spec, /*optimistic=*/true);
}

double wire_bytes(const Machine& m, Algorithm algorithm, size_t count,
                  const std::optional<CodecSpec>& spec) {
  return load_of(m, traits_of(m.resolve(algorithm, spec.has_value())), count, spec).wire_bytes;
}

}  // namespace qsgd
