#include "planner/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>

#include "collectives/reduce.h"
#include "collectives/ring_allreduce.h"
#include "common/error.h"
#include "common/kept.h"

namespace qsgd {
namespace {

constexpr size_t kSmallBytes = 8;
constexpr size_t kLargeBytes =
    4 << 20;  // beyond the burst that a shaped or buffered wire lets pass
constexpr int kSmallRepeats = 25;
constexpr int kLargeRepeats = 4;
constexpr size_t kElements = 1 << 20;  // 4 MiB: beyond the second-level cache, as gradients are
constexpr int kCodecRepeats = 3;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The first run warms up and does not count.
double median_s(int repeats, const std::function<void()>& run) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> seconds;
  run();
  for (int i = 0; i < repeats; ++i) {
    const auto begin = Clock::now();
    run();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return median(std::move(seconds));
}

// Sends to `to` while receiving from `from`.
double exchange_s(Transport& transport, int to, int from, size_t size_bytes, int repeats) {
  const KeptOnFailure<std::vector<char>> out(std::vector<char>(size_bytes, 1));
  KeptOnFailure<std::vector<char>> in(std::vector<char>(size_bytes, 0));
  return median_s(repeats, [&] {
    std::vector<RequestPtr> requests;
    requests.push_back(transport.irecv(from, Tag::kData, in->data(), size_bytes));
    requests.push_back(transport.isend(to, Tag::kData, out->data(), size_bytes));
    transport.wait(requests);
  });
}

Link link_to(Transport& transport, int to, int from) {
  const double small_s = exchange_s(transport, to, from, kSmallBytes, kSmallRepeats);
  const double large_s = exchange_s(transport, to, from, kLargeBytes, kLargeRepeats);
  return {small_s, std::max(0.0, large_s - small_s) / kLargeBytes};
}

// Each rank with the next of its node, the last with the first.
Link measure_within(Transport& transport, int per_node) {
  if (per_node == 1) return {};
  const int rank = transport.rank(), first = rank - rank % per_node;
  return link_to(transport, first + (rank + 1) % per_node,
                 first + (rank + per_node - 1) % per_node);
}

// Each rank with its fellow on the next node.
Link measure_across(Transport& transport, int per_node) {
  const int rank = transport.rank(), size = transport.size();
  if (size == per_node) return {};
  return link_to(transport, (rank + per_node) % size, (rank + size - per_node) % size);
}

class CodecRun {
 public:
  CodecRun(const CodecSpec& spec, Workers* workers)
      : spec_(spec),
        workers_(workers),
        part_(kMaxBucket / spec.bucket * spec.bucket),
        count_(kElements / part_ * part_),
        x_(count_),
        sum_(count_),
        scales_(spec.scales(count_)),
        codes_(spec.code_bytes(count_)) {
    for (size_t i = 0; i < count_; ++i) x_[i] = std::sin(static_cast<float>(i));
  }

  CodecCost cost() {
    const auto n = static_cast<double>(count_);
    return {spec_, seconds(&CodecRun::encode_part) / n, seconds(&CodecRun::decode_part) / n,
            seconds(&CodecRun::add_part) / n};
  }

 private:
  using Part = void (CodecRun::*)(size_t begin);

  double seconds(Part part) {
    const size_t tasks = count_ / part_;
    return median_s(kCodecRepeats, [&] {
      const auto task = [&](size_t i) { (this->*part)(i * part_); };
      if (workers_ != nullptr) {
        workers_->run(tasks, task);
      } else {
        for (size_t i = 0; i < tasks; ++i) task(i);
      }
    });
  }

  void encode_part(size_t begin) {
    const NoiseKey key{0, 0, 0, 0, Phase::kScatter};
    encode(&x_[begin], DType::kFloat32, part_, begin, spec_, key, scales(begin), codes(begin));
  }
  void decode_part(size_t begin) {
    decode(scales(begin), codes(begin), part_, spec_, &sum_[begin], DType::kFloat32);
  }
  void add_part(size_t begin) {
    decode_add(scales(begin), codes(begin), part_, spec_, &sum_[begin]);
  }
  float* scales(size_t begin) { return scales_.data() + spec_.scales(begin); }
  uint8_t* codes(size_t begin) { return codes_.data() + spec_.code_bytes(begin); }

  const CodecSpec spec_;
  Workers* const workers_;
  const size_t part_;  // elements of a task: whole buckets
  const size_t count_;
  std::vector<float> x_, sum_, scales_;
  std::vector<uint8_t> codes_;
};

double add_s_per_byte() {
  const std::vector<float> from(kElements, 1.0f);
  std::vector<float> into(kElements, 0.0f);
  const double seconds = median_s(kCodecRepeats, [&] {
    reduce_into(into.data(), from.data(), kElements, DType::kFloat32, ReduceOp::kSum);
  });
  return seconds / (kElements * sizeof(float));
}

std::vector<double*> times_of(Machine& m) {
  std::vector<double*> times{&m.add_s_per_byte, &m.exact_start_s, &m.coded_start_s,
                             &m.coded_s_per_element};
  for (Link* link : {&m.within, &m.across, &m.shared}) {
    times.push_back(&link->alpha_s);
    times.push_back(&link->beta_s_per_byte);
  }
  for (CodecCost& c : m.codecs) {
    for (double* time : {&c.encode_s, &c.decode_s, &c.decode_add_s}) times.push_back(time);
  }
  return times;
}

// Replaces each time by its maximum over the ranks.
void agree_on_maxima(Transport& transport, Machine& machine) {
  const std::vector<double*> times = times_of(machine);
  KeptOnFailure<std::vector<double>> values;
  for (const double* time : times) values->push_back(*time);
  std::vector<ReduceTensor> tensors{{values->data(), values->data(), values->size(), 0, 0}};
  ring_allreduce(transport, tensors, {DType::kFloat64, ReduceOp::kMax});
  for (size_t i = 0; i < times.size(); ++i) *times[i] = (*values)[i];
}

// How much longer an allreduce takes than the model says.
double unexplained_s(Communicator& communicator, const Machine& machine, size_t count,
                     const std::optional<CodecSpec>& spec, int repeats) {
  // Neither zeros, which are coded faster, nor sums that grow from run to run.
  KeptOnFailure<std::vector<float>> x(std::vector<float>(count, 0)), sum(*x);
  for (size_t i = 0; i < count; ++i) (*x)[i] = std::sin(static_cast<float>(i));
  std::vector<ReduceTensor> tensors{{x->data(), sum->data(), count, 0, 0}};
  const double whole_s = median_s(repeats, [&] {
    allreduce(communicator, tensors, {}, spec, machine.resolve(Algorithm::kAuto, spec.has_value()),
              0);
  });
  return std::max(0.0, whole_s - allreduce_s(machine, Algorithm::kAuto, count, spec));
}

// Through a node's memory: nothing else explains what these algorithms take.
Link measure_shared(Communicator& communicator, const Machine& machine) {
  if (machine.exact != Algorithm::kShared && machine.exact != Algorithm::kHierarchical) return {};
  const auto seconds = [&](size_t size_bytes, int repeats) {
    return unexplained_s(communicator, machine, size_bytes / sizeof(float), {}, repeats);
  };
  const double small_s = seconds(kSmallBytes, kSmallRepeats);
  const double large_s = seconds(kLargeBytes, kLargeRepeats);
  return {small_s, std::max(0.0, large_s - small_s) / kLargeBytes};
}

}  // namespace

Machine measure(Communicator& communicator, int ranks_per_node,
                const std::vector<CodecSpec>& codecs) {
  Transport& transport = communicator.transport;
  Machine m;
  m.ranks = transport.size();
  m.ranks_per_node = ranks_per_node;
  m.exact = resolve(communicator, false, Algorithm::kAuto);
  m.coded = resolve(communicator, true, Algorithm::kAuto);
  check(m);
  m.within = measure_within(transport, ranks_per_node);
  m.across = measure_across(transport, ranks_per_node);
  m.add_s_per_byte = add_s_per_byte();
  for (const CodecSpec& spec : codecs) {
    m.codecs.push_back(CodecRun(spec, communicator.workers).cost());
  }
  agree_on_maxima(transport, m);  // before the next step, which subtracts what they explain
  m.shared = measure_shared(communicator, m);
  agree_on_maxima(transport, m);
  if (m.ranks == 1 || codecs.empty()) return m;
  const size_t count = static_cast<size_t>(m.ranks) * codecs[0].bucket;  // a bucket for each owner
  m.exact_start_s = unexplained_s(communicator, m, count, {}, kSmallRepeats);
  // As many messages, and coding besides: if it starts sooner, that is the noise of a busy machine,
  // for which no tensor shall be coded.
  m.coded_start_s =
      std::max(m.exact_start_s, unexplained_s(communicator, m, count, codecs[0], kSmallRepeats));
  agree_on_maxima(transport, m);
  m.coded_s_per_element = unexplained_s(communicator, m, kElements, codecs[0], kLargeRepeats) /
                          static_cast<double>(kElements);
  agree_on_maxima(transport, m);
  return m;
}

}  // namespace qsgd
