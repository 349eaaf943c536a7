#include "planner/cost_model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>

#include "collectives/direct_allreduce.h"
#include "common/error.h"

namespace qsgd {
namespace {

constexpr double kSegmentBytes = 256 << 10;  // what overlaps: one segment is coded, one travels

// Both run side by side once the first segment is through.
double overlapped(double wire_s, double work_s, double bytes) {
  const double segments = std::max(1.0, std::ceil(bytes / kSegmentBytes));
  return std::max(wire_s, work_s) + std::min(wire_s, work_s) / segments;
}

// What one allreduce asks of a rank.
struct Load {
  double messages = 0;
  double wire = 0;      // bytes sent
  double work_s = 0;    // coding and adding
  double before_s = 0;  // through the window, before and after the wire
};

// p ranks, `bytes` of float32 each.
Load exact_load(Algorithm algorithm, double p, double bytes, double add_s_per_byte) {
  const double share = (p - 1) / p;
  const double add_s = bytes * add_s_per_byte;
  const double rounds = std::ceil(std::log2(p));
  // Ranks beyond the last power of two hand their tensor over and get the result back.
  const bool odd = std::exp2(rounds) != p;
  switch (algorithm) {
    case Algorithm::kRecursiveDoubling:
      return {rounds + odd, (rounds + odd) * bytes, (rounds + odd) * add_s, 0};
    case Algorithm::kRabenseifner:
      return {2 * rounds + odd, (2 * share + odd) * bytes, (share + odd) * add_s, 0};
    case Algorithm::kDirect:
      switch (direct_way(static_cast<int>(p), static_cast<size_t>(bytes))) {
        case DirectWay::kDoubling:
          return {rounds, rounds * bytes, rounds * add_s, 0};
        case DirectWay::kGather:
          return {rounds, (p - 1) * bytes, (p - 1) * add_s, 0};
        case DirectWay::kExchange:
          break;
      }
      [[fallthrough]];
    default:  // the ring sends as much
      return {2 * (p - 1), 2 * share * bytes, share * add_s, 0};
  }
}

Load coded_load(Algorithm algorithm, double p, double count, double width, const CodecCost& cost) {
  const double share = (p - 1) / p;
  const double coded = width * count;
  switch (algorithm) {
    case Algorithm::kAllgather:
      return {p - 1, (p - 1) * coded, count * (cost.encode_s + p * cost.decode_add_s), 0};
    case Algorithm::kSra2d: {
      const double side = std::sqrt(p);
      const double passes = share + 1 / side + 1 / p;  // rows, columns, and the result
      return {
          4 * (side - 1), 2 * share * coded,
          count * (passes * cost.encode_s + (share + 1 / side) * cost.decode_add_s + cost.decode_s),
          0};
    }
    case Algorithm::kRequantizingRing:
      return {2 * (p - 1), 2 * share * coded,
              count * (cost.encode_s + share * (cost.decode_add_s + cost.decode_s)), 0};
    default:  // SRA: the owner codes its sum, everybody codes what it sends to the owners
      return {2 * (p - 1), 2 * share * coded,
              count * (cost.encode_s + share * cost.decode_add_s + cost.decode_s), 0};
  }
}

bool is_hierarchical(Algorithm algorithm) {
  return algorithm == Algorithm::kHierarchical || algorithm == Algorithm::kHierarchicalSra;
}

Load load_of(const Machine& m, Algorithm algorithm, size_t count,
             const std::optional<CodecSpec>& spec) {
  const auto n = static_cast<double>(count);
  const double bytes = n * sizeof(float);
  if (m.ranks == 1) return {};
  if (algorithm == Algorithm::kShared) return {0, 0, 0, m.shared(1, bytes)};
  const auto width = [&](size_t elements) {
    return elements == 0 ? 0.0 : static_cast<double>(spec->bytes(elements)) / double(elements);
  };
  if (is_hierarchical(algorithm)) {  // every rank takes its shard across the nodes
    const double shard = n / m.ranks_per_node;
    Load load =
        spec ? coded_load(Algorithm::kSra, m.nodes(), shard, width(count), m.codec(*spec))
             : exact_load(Algorithm::kDirect, m.nodes(), shard * sizeof(float), m.add_s_per_byte);
    load.before_s = m.shared(1, bytes);
    return load;
  }
  return spec ? coded_load(algorithm, m.ranks, n, width(count), m.codec(*spec))
              : exact_load(algorithm, m.ranks, bytes, m.add_s_per_byte);
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
  const auto require = [](bool holds, const char* field, double value, const char* range) {
    if (holds) return;
    throw usage_error(std::string("measured machine: ") + field + " is " + std::to_string(value) +
                      ", expected " + range + "; measure it again");
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
  require_time("exact_start_s", m.exact_start_s);
  require_time("coded_start_s", m.coded_start_s);
  require_time("coded_s_per_element", m.coded_s_per_element);
  for (const CodecCost& c : m.codecs) {
    require_time("encode_s", c.encode_s);
    require_time("decode_s", c.decode_s);
    require_time("decode_add_s", c.decode_add_s);
  }
}

double allreduce_s(const Machine& m, Algorithm algorithm, size_t count,
                   const std::optional<CodecSpec>& spec) {
  if (m.ranks == 1) return 0;
  const Algorithm chosen = m.resolve(algorithm, spec.has_value());
  const Load load = load_of(m, chosen, count, spec);
  const Link link = is_hierarchical(chosen) ? m.across : m.link();
  const double start_s =
      spec ? m.coded_start_s + static_cast<double>(count) * m.coded_s_per_element : m.exact_start_s;
  return start_s + load.before_s + load.messages * link.alpha_s +
         overlapped(load.wire * link.beta_s_per_byte, load.work_s, load.wire);
}

double wire_bytes(const Machine& m, Algorithm algorithm, size_t count,
                  const std::optional<CodecSpec>& spec) {
  return load_of(m, m.resolve(algorithm, spec.has_value()), count, spec).wire;
}

namespace {

double bytes_per_element(const CodecSpec& spec) {
  return static_cast<double>(spec.bytes(spec.bucket)) / spec.bucket;
}

}  // namespace

double break_even_bandwidth(int ranks, double element_bytes, const CodecSpec& spec,
                            double codec_s_per_element) {
  const double travels = 2.0 * (ranks - 1) / ranks;
  return travels * (element_bytes - bytes_per_element(spec)) / codec_s_per_element;
}

double break_even_bytes(int ranks, const CodecSpec& spec, double bandwidth, double fixed_s,
                        double codec_s_per_element) {
  const double travels = 2.0 * (ranks - 1) / ranks;
  const double saved_s =
      travels * (sizeof(float) - bytes_per_element(spec)) / bandwidth - codec_s_per_element;
  if (saved_s <= 0) return std::numeric_limits<double>::infinity();
  return sizeof(float) * fixed_s / saved_s;
}

}  // namespace qsgd
