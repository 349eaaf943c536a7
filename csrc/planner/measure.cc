#include "planner/measure.h"

#include <algorithm>
#include <vector>

#include "collectives/exchange.h"
#include "common/kept.h"
#include "planner/codec_timing.h"
#include "planner/observe.h"
#include "planner/stopwatch.h"

namespace qsgd {
namespace {

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
