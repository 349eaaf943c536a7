#include "engine/reducer.h"

#include <algorithm>

#include "collectives/hierarchical.h"
#include "collectives/segments.h"
#include "common/kept.h"

namespace qsgd {
namespace {

constexpr const char* kRemedy =
    "; QSGD_NONFINITE=warn or =propagate lets training go on (a loss scaler needs propagate).";
constexpr const char* kGoesOn =
    ". Training goes on, and this is said only once; QSGD_NONFINITE=error ends it instead.";

uint32_t hash_name(const std::string& name) {  // FNV-1a
  uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

}  // namespace

Reducer::Reducer(Communicator communicator, std::vector<int> ranks, ReducerConfig config)
    : communicator_(communicator),
      ranks_(std::move(ranks)),
      config_(std::move(config)),
      residuals_(
          rank(),
          [this](size_t count, uint32_t bucket, uint32_t id, int owners) {
            return coded_here(count, bucket, id, owners);
          },
          [this](size_t count, uint32_t bucket, uint32_t id, int owners) {
            return paid_here(count, bucket, id, owners);
          },
          config_.log) {}

Residuals::Paid Reducer::paid_here(size_t count, uint32_t bucket, uint32_t id, int owners) const {
  if (owners == 0) return {{0, count}, size()};
  const SharedNode& node = *communicator_.node;
  return {hierarchical_shard(node, owners, count, bucket, id),
          static_cast<int>(node.nodes().size())};
}

Range Reducer::coded_here(size_t count, uint32_t bucket, uint32_t id, int owners) const {
  if (owners > 0) return hierarchical_owned(*communicator_.node, owners, count, bucket, id);
  return owned(count, bucket, id, size(), rank());
}

std::vector<std::string> Reducer::reduce(const std::vector<Item>& items,
                                         const std::vector<CodecSpec>& codings, Algorithm algorithm,
                                         size_t segment) {
  const bool coded = !codings.empty();
  KeptOnFailure<Settled> settled;
  const AlgorithmTraits& traits = traits_of(algorithm);
  const int owners = coded && traits.has(kAcross) ? owners_of(*communicator_.node, traits) : 0;
  std::vector<ReduceTensor> tensors = prepare(items, codings, owners, *settled);
  const ReduceArgs& args = items.front().operation->args;
  exchange_.algorithm = args.op == ReduceOp::kAdasum ? "adasum" : traits.name;
  exchange_.begin = std::chrono::steady_clock::now();
  Pipelining pipelining;
  pipelining.segment = segment;
  Communicator communicator = communicator_;
  communicator.pipelining = &pipelining;
  allreduce(communicator, tensors, args, coded, algorithm, config_.seed);
  exchange_.end = std::chrono::steady_clock::now();
  exchange_.coding_s = 0;
  for (const ReduceTensor& tensor : tensors) exchange_.coding_s += tensor.coding_s;
  take_note(items, codings, tensors);
  return judge(items, tensors);
}

std::vector<ReduceTensor> Reducer::prepare(const std::vector<Item>& items,
                                           const std::vector<CodecSpec>& codings, int owners,
                                           Settled& settled) {
  const bool coded = !codings.empty();
  std::vector<ReduceTensor> tensors;
  for (const Item& item : items) {
    const Operation& o = *item.operation;
    const uint32_t step = coded && o.lasting ? steps_[o.name]++ : 0;
    tensors.push_back({item.in, item.out, o.count(), hash_name(o.name), step});
    if (coded) tensors.back().spec = codings.at(tensors.size() - 1);
    const double scale =
        o.args.prescale * o.args.postscale / (o.args.op == ReduceOp::kAverage ? size() : 1);
    if (coded && o.coding->error_feedback && size() > 1) {
      residuals_.lend(o.name, tensors.back().spec.bucket, scale, owners, tensors.back());
      continue;
    }
    std::vector<char> input = residuals_.settle(o.name, o.args.dtype, scale, tensors.back());
    if (input.empty()) continue;
    settled.push_back(std::move(input));
    tensors.back().in = settled.back().data();
  }
  return tensors;
}

void Reducer::take_note(const std::vector<Item>& items, const std::vector<CodecSpec>& codings,
                        const std::vector<ReduceTensor>& tensors) {
  for (size_t i = 0; i < items.size(); ++i) {
    const Operation& o = *items[i].operation;
    // On every rank alike, as the result is.
    if (!tensors[i].result_finite && tensors[i].residual) residuals_.forget(o.name);
    if (!o.coding || !o.lasting) continue;
    const auto coding = codings.empty() ? std::nullopt : std::optional<CodecSpec>(codings[i]);
    quality_.record(o.name, coding, o.args.dtype, tensors[i]);
  }
}

std::vector<std::string> Reducer::judge(const std::vector<Item>& items,
                                        const std::vector<ReduceTensor>& tensors) {
  std::vector<std::string> faults(items.size());
  if (!items.front().operation->check_finite || config_.nonfinite == NonFinite::kPropagate ||
      warned_) {
    return faults;
  }
  std::vector<std::string> names;
  for (const Item& item : items) names.push_back(item.operation->name);
  std::vector<std::string> messages = explain_nonfinite(communicator_, ranks_, names, tensors);
  if (config_.nonfinite == NonFinite::kError) {
    for (std::string& message : messages) {
      if (!message.empty()) message += kRemedy;
    }
    return messages;
  }
  const auto first = std::find_if(messages.begin(), messages.end(),
                                  [](const std::string& message) { return !message.empty(); });
  if (first == messages.end()) return faults;
  warned_ = true;  // on every rank alike, as the messages are
  if (rank() == 0 && config_.log) config_.log(*first + kGoesOn);
  return faults;
}

}  // namespace qsgd
