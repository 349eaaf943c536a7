#include "planner/measure.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "collectives/exchange.h"
#include "common/kept.h"
#include "planner/codec_timing.h"

namespace qsgd {
namespace {

constexpr size_t kLeast = size_t{1} << 10;  // elements
constexpr size_t kMost = size_t{1} << 22;
constexpr size_t kStep = 4;
constexpr double kLong_s = 20e-3;  // a trial; longer ones are limited by the bandwidth only
constexpr double kFar = 2;         // times the fastest of its kind: not worth a trial
constexpr double kSample_s = 1e-3;
constexpr int kMostCalls = 16;
constexpr double kLargestSum = 1e30;  // sums grow p-fold with each call
constexpr double kTrial_s = 6e-3;
constexpr int kFewestSamples = 5, kMostSamples = 15;

struct Candidate {
  Algorithm algorithm;
  std::optional<CodecSpec> spec;
  std::vector<double> samples_s;
};

bool is_worth_trying(const Machine& m, Algorithm algorithm) {
  const AlgorithmTraits& traits = traits_of(algorithm);
  if (algorithm == m.exact || algorithm == m.coded) return true;
  if (traits.has(kForComparison)) return false;
  // On one node, or with one rank per node, it equals another algorithm.
  return !traits.has(kAcross) || (m.ranks_per_node > 1 && m.ranks > m.ranks_per_node);
}

std::vector<Candidate> kind(Communicator& communicator, const Machine& m,
                            const std::optional<CodecSpec>& spec) {
  std::vector<Candidate> candidates;
  for (const Algorithm algorithm : fitting(communicator, spec.has_value())) {
    if (is_worth_trying(m, algorithm)) candidates.push_back({algorithm, spec, {}});
  }
  return candidates;
}

// The candidates of one kind that are worth a trial at this size, by the observations so far.
std::vector<Candidate> promising(const Machine& m, std::vector<Candidate> candidates,
                                 size_t count) {
  const auto expected_s = [&](const Candidate& c) {
    return optimistic_s(m, c.algorithm, count, c.spec);
  };
  double fastest_s = kLong_s;
  for (const Candidate& c : candidates) fastest_s = std::min(fastest_s, expected_s(c));
  const auto end = std::remove_if(candidates.begin(), candidates.end(), [&](const Candidate& c) {
    const double s = expected_s(c);
    return s >= kLong_s || (count > kLeast && s > kFar * fastest_s);
  });
  candidates.erase(end, candidates.end());
  return candidates;
}

class Trials {
 public:
  explicit Trials(Communicator& communicator) : communicator_(communicator) {
    most_calls_ = std::min<int>(
        kMostCalls,
        static_cast<int>(std::log(kLargestSum) / std::log(communicator.transport.size())));
    source_.resize(kMost);
    // Neither zeros, which are coded faster, nor equal on all ranks.
    const auto shift = static_cast<float>(communicator.transport.rank());
    for (size_t i = 0; i < kMost; ++i) source_[i] = std::sin(static_cast<float>(i) + shift);
    x_->resize(kMost);
  }

  // Alternates the candidates, so that disturbances affect all alike.
  void run(std::vector<Candidate>& candidates, size_t count, const Machine& m) {
    double round_s = 0;
    for (const Candidate& c : candidates) {
      const double s = allreduce_s(m, c.algorithm, count, c.spec);
      round_s += s * calls(s);
    }
    const double share_s = round_s / static_cast<double>(candidates.size());
    const int samples =
        std::clamp(static_cast<int>(kTrial_s / share_s), kFewestSamples, kMostSamples);
    for (int i = 0; i <= samples; ++i) {
      for (Candidate& c : candidates) {
        const double s = sample_s(c, count, calls(allreduce_s(m, c.algorithm, count, c.spec)));
        if (i > 0) c.samples_s.push_back(s);  // the first warms up
      }
    }
  }

 private:
  int calls(double expected_s) const {
    return std::clamp(static_cast<int>(kSample_s / std::max(expected_s, 1e-6)), 1, most_calls_);
  }

  double sample_s(const Candidate& c, size_t count, int calls) {
    std::memcpy(x_->data(), source_.data(), count * sizeof(float));
    std::vector<ReduceTensor> tensors{{x_->data(), x_->data(), count, 0, 0}};
    const auto reduce = [&] { allreduce(communicator_, tensors, {}, c.spec, c.algorithm, 0); };
    if (calls > 1) reduce();  // the caches contain another candidate's data
    barrier(communicator_.transport);
    return seconds_of([&] {
             for (int i = 0; i < calls; ++i) reduce();
           }) /
           calls;
  }

  Communicator& communicator_;
  int most_calls_;
  std::vector<float> source_;
  KeptOnFailure<std::vector<float>> x_;
};

// Replaces each value by its maximum over the ranks, because the slowest rank limits the others.
// Collective.
void agree_on_maxima(Communicator& communicator, const std::vector<double*>& values) {
  KeptOnFailure<std::vector<double>> agreed;
  for (const double* value : values) agreed->push_back(*value);
  std::vector<ReduceTensor> tensors{{agreed->data(), agreed->data(), agreed->size(), 0, 0}};
  allreduce(communicator, tensors, {DType::kFloat64, ReduceOp::kMax}, std::nullopt,
            Algorithm::kRing, 0);
  for (size_t i = 0; i < values.size(); ++i) *values[i] = (*agreed)[i];
}

// Adds to machine.observed the times of allreduces of 4 KB to 16 MB by every algorithm that suits
// the ranks: exact ones, and compressed ones with each of the codecs. Skips trials that would take
// long, or that are far from the fastest of their kind and so would not be chosen. Collective;
// every rank returns the same.
void observe(Communicator& communicator, Machine& machine, const std::vector<CodecSpec>& codecs) {
  if (machine.ranks == 1) return;
  std::vector<std::vector<Candidate>> kinds{kind(communicator, machine, std::nullopt)};
  for (const CodecSpec& spec : codecs) kinds.push_back(kind(communicator, machine, spec));
  Trials trials(communicator);
  for (size_t count = kLeast; count <= kMost; count *= kStep) {
    std::vector<Candidate> candidates;
    for (const std::vector<Candidate>& kind : kinds) {
      for (Candidate& c : promising(machine, kind, count)) candidates.push_back(std::move(c));
    }
    if (candidates.empty()) return;
    trials.run(candidates, count, machine);
    const size_t known = machine.observed.size();
    for (Candidate& c : candidates) {
      machine.observed.push_back({c.algorithm, c.spec, count, median(std::move(c.samples_s))});
    }
    std::vector<double*> fresh;
    for (size_t i = known; i < machine.observed.size(); ++i) {
      fresh.push_back(&machine.observed[i].seconds);
    }
    agree_on_maxima(communicator, fresh);  // so that every rank tries the same next
  }
}

constexpr size_t kSmallBytes = 8;
constexpr size_t kLargeBytes = 4 << 20;  // more than the burst that traffic shapers let pass
constexpr int kSmallRepeats = 25;
constexpr int kLargeRepeats = 4;

// Time of sending to `to` while receiving from `from`.
double exchange_s(Transport& transport, int to, int from, size_t size_bytes, int repeats) {
  const KeptOnFailure<std::vector<char>> out(std::vector<char>(size_bytes, 1));
  KeptOnFailure<std::vector<char>> in(std::vector<char>(size_bytes, 0));
  return median_s(repeats, [&] {
    send_receive(transport, Tag::kData, to, out->data(), size_bytes, from, in->data(), size_bytes);
  });
}

// seconds(size_bytes, repeats) returns the measured time of a message.
template <class Seconds>
Link link_of(const Seconds& seconds) {
  const double small_s = seconds(kSmallBytes, kSmallRepeats);
  const double large_s = seconds(kLargeBytes, kLargeRepeats);
  return {small_s, std::max(0.0, large_s - small_s) / kLargeBytes};
}

Link link_to(Transport& transport, int to, int from) {
  return link_of([&](size_t size_bytes, int repeats) {
    return exchange_s(transport, to, from, size_bytes, repeats);
  });
}

// Each rank sends to the next one of its node, the last to the first.
Link measure_within(Transport& transport, int per_node) {
  if (per_node == 1) return {};
  const int rank = transport.rank(), first = rank - rank % per_node;
  return link_to(transport, first + (rank + 1) % per_node,
                 first + (rank + per_node - 1) % per_node);
}

// Each rank sends to the corresponding rank of the next node.
Link measure_across(Transport& transport, int per_node) {
  const int rank = transport.rank(), size = transport.size();
  if (size == per_node) return {};
  return link_to(transport, (rank + per_node) % size, (rank + size - per_node) % size);
}

std::vector<double*> times_of(Machine& m) {
  std::vector<double*> times{&m.add_s_per_byte};
  for (Link* link : {&m.within, &m.across, &m.shared}) {
    times.push_back(&link->alpha_s);
    times.push_back(&link->beta_s_per_byte);
  }
  for (CodecCost& c : m.codecs) {
    for (double* time : {&c.encode_s, &c.decode_s, &c.decode_add_s}) times.push_back(time);
  }
  return times;
}

// Link of the node's shared memory: the part of the time that other constants do not explain.
Link measure_shared(Communicator& communicator, const Machine& machine) {
  if (!traits_of(machine.exact).has(kNeedsNode)) return {};
  return link_of([&](size_t size_bytes, int repeats) {
    const size_t count = size_bytes / sizeof(float);
    KeptOnFailure<std::vector<float>> x(std::vector<float>(count, 1)), sum(*x);
    std::vector<ReduceTensor> tensors{{x->data(), sum->data(), count, 0, 0}};
    const double whole_s = median_s(
        repeats, [&] { allreduce(communicator, tensors, {}, std::nullopt, machine.exact, 0); });
    return std::max(0.0, whole_s - allreduce_s(machine, machine.exact, count, std::nullopt));
  });
}

}  // namespace

Machine measure(Communicator& communicator, int ranks_per_node,
                const std::vector<CodecSpec>& codecs, const std::vector<CodecSpec>& untried) {
  Transport& transport = communicator.transport;
  Machine m;
  m.ranks = transport.size();
  m.ranks_per_node = ranks_per_node;
  m.exact = resolve(communicator, false, Algorithm::kAuto);
  m.coded = resolve(communicator, true, Algorithm::kAuto);
  check(m);
  m.within = measure_within(transport, ranks_per_node);
  m.across = measure_across(transport, ranks_per_node);
  m.add_s_per_byte = time_adding_s_per_byte();
  for (const std::vector<CodecSpec>* list : {&codecs, &untried}) {
    for (const CodecSpec& spec : *list) m.codecs.push_back(time_codec(spec, communicator.workers));
  }
  agree_on_maxima(communicator, times_of(m));  // the next measurement subtracts what these explain
  m.shared = measure_shared(communicator, m);
  agree_on_maxima(communicator, times_of(m));
  observe(communicator, m, codecs);
  return m;
}

}  // namespace qsgd
