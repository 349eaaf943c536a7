#include "engine/reducer.h"

#include <algorithm>
#include <optional>
#include <type_traits>

#include "collectives/hierarchical.h"
#include "collectives/segments.h"
#include "common/kept.h"
#include "common/listed.h"
#include "engine/staging.h"
#include "quant/code.h"

namespace qsgd {
namespace {

std::string explain(const std::string& name, const std::vector<int>& from) {
  return "tensor '" + name + "' holds NaN or Inf after allreduce; " +
         (from.empty() ? "every rank's own values were finite, so the sum overflowed"
                       : "the values came from rank(s) " + listed(from)) +
         ". Lower the learning rate or scale the loss";
}

// Returns, for each tensor, an empty string or a sentence without its full stop if the result is
// not finite. Results are equal on all ranks, so every rank calls this with the same tensors; one
// more small exchange finds the ranks whose input was not finite. `names_of_ranks`: the
// communicator's ranks, as numbered in messages.
std::vector<std::string> explain_nonfinite(Communicator& communicator,
                                           const std::vector<int>& names_of_ranks,
                                           const std::vector<std::string>& names,
                                           const std::vector<ReduceTensor>& tensors) {
  std::vector<std::string> messages(names.size());
  std::vector<size_t> bad;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].result_finite) bad.push_back(i);
  }
  if (bad.empty()) return messages;
  const auto ranks = static_cast<size_t>(communicator.transport.size());
  const auto rank = static_cast<size_t>(communicator.transport.rank());
  std::vector<int32_t> guilty(bad.size() * ranks, 0);
  for (size_t b = 0; b < bad.size(); ++b) {
    guilty[b * ranks + rank] = !tensors[bad[b]].input_finite;
  }
  std::vector<ReduceTensor> flags{{guilty.data(), guilty.data(), guilty.size(), 0, 0}};
  const ReduceArgs sum{DType::kInt32, ReduceOp::kSum, 1, 1};
  allreduce(communicator, flags, sum, std::nullopt, Algorithm::kAuto, 0);
  for (size_t b = 0; b < bad.size(); ++b) {
    std::vector<int> from;
    for (size_t r = 0; r < ranks; ++r) {
      if (guilty[b * ranks + r]) from.push_back(names_of_ranks[r]);
    }
    messages[bad[b]] = explain(names[bad[b]], from);
  }
  return messages;
}

constexpr const char* kRemedy =
    "; QSGD_NONFINITE=warn or =propagate lets training go on (a loss scaler needs propagate).";
constexpr const char* kGoesOn =
    ". Training continues, without this step if a loss scaler skips it. This warning is not "
    "repeated; QSGD_NONFINITE=error ends the training instead.";

uint32_t hash_name(const std::string& name) {  // FNV-1a
  uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

bool is_sum(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAverage; }

std::vector<char> sum_of(const void* in, DType dtype, const std::vector<float>& extra) {
  std::vector<char> sum(extra.size() * facts(dtype).size);
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    T* const to = reinterpret_cast<T*>(sum.data());
    for (size_t i = 0; i < extra.size(); ++i) {
      const auto value = static_cast<Wide>(static_cast<const T*>(in)[i]);
      to[i] = static_cast<T>(value + static_cast<Wide>(extra[i]));
    }
  });
  return sum;
}

// For variable-length codes: as measured in the last reduction.
double code_bits(const std::optional<CodecSpec>& coding, DType dtype, const ReduceTensor& tensor) {
  if (!coding) return 8.0 * static_cast<double>(facts(dtype).size);
  if (tensor.coded_count > 0) {
    return 8.0 * static_cast<double>(tensor.coded_bytes) / static_cast<double>(tensor.coded_count);
  }
  return 8.0 * coding->mean_code_bytes(coding->bucket) / coding->bucket;
}

size_t wire_bytes(const std::optional<CodecSpec>& coding, DType dtype, const ReduceTensor& tensor) {
  if (!coding) return tensor.count * facts(dtype).size;
  if (!traits_of(coding->scheme).has(kVaries)) return coding->bytes(tensor.count);
  const double codes = code_bits(coding, dtype, tensor) / 8 * static_cast<double>(tensor.count);
  return coding->scales(tensor.count) * sizeof(float) + static_cast<size_t>(codes);
}

}  // namespace

Reducer::Reducer(Communicator communicator, std::vector<int> ranks, ReducerConfig config)
    : communicator_(communicator),
      ranks_(std::move(ranks)),
      config_(std::move(config)),
      residuals_(communicator, config_.log) {}

int Reducer::owners_in(const AlgorithmTraits& traits) const {
  if (traits.has(kAcross)) return owners_of(*communicator_.node, traits);
  return traits.has(kCodesInputs) ? Residuals::kNoSums : 0;
}

bool Reducer::codes_on(const gpu::Device* device, const Response& response,
                       const std::vector<Entry*>& entries) const {
  const std::vector<CodecSpec>& codings = response.codings;
  // The residual of a tensor that no longer has error feedback is added on the host.
  const auto has_leftover = [&](const Entry* entry) {
    const Operation& o = *entry->operation;
    return !o.coding->error_feedback && residuals_.has(o.name);
  };
  return device != nullptr && !codings.empty() && size() > 1 &&
         traits_of(response.algorithm).has(kAnyPlace) &&
         std::all_of(codings.begin(), codings.end(),
                     [&](const CodecSpec& spec) { return device->codes(spec); }) &&
         std::none_of(entries.begin(), entries.end(), has_leftover);
}

bool Reducer::sums_in_nodes(const Response& response) const {
  const std::vector<CodecSpec>& codings = response.codings;
  return communicator_.node != nullptr && response.on_device && !codings.empty() &&
         traits_of(response.algorithm).has(kAcross);
}

std::vector<Outcome> Reducer::reduce(const Response& response, const std::vector<Entry*>& entries,
                                     gpu::Device* device, gpu::Nccl* nccl) {
  const std::vector<CodecSpec>& codings = response.codings;
  const bool coded = !codings.empty();
  KeptOnFailure<Inputs> inputs;
  const AlgorithmTraits& traits = traits_of(response.algorithm);
  const int owners = coded ? owners_in(traits) : 0;
  if (nccl != nullptr) device = &nccl->device();
  std::vector<ReduceTensor> tensors = prepare(entries, codings, owners, device, *inputs);
  const ReduceArgs& args = entries.front()->operation->args;
  exchange_.algorithm = nccl != nullptr && !coded      ? "nccl"
                        : args.op == ReduceOp::kAdasum ? "adasum"
                                                       : traits.name;
  exchange_.begin = std::chrono::steady_clock::now();
  Pipelining pipelining;
  pipelining.segment = response.segment.elements();
  Communicator communicator = communicator_;
  communicator.pipelining = &pipelining;
  if (nccl != nullptr && coded) communicator.within = nccl;
  if (nccl != nullptr && !coded) {
    nccl->allreduce(tensors, args, checks_finite(*entries.front()->operation));
  } else {
    allreduce(communicator, tensors, args, coded, response.algorithm, config_.seed);
  }
  exchange_.end = std::chrono::steady_clock::now();
  exchange_.coding_s = 0;
  for (const ReduceTensor& tensor : tensors) exchange_.coding_s += tensor.coding_s;
  record_quality(entries, codings, tensors);
  return judge(entries, tensors);
}

std::vector<ReduceTensor> Reducer::prepare(const std::vector<Entry*>& entries,
                                           const std::vector<CodecSpec>& codings, int owners,
                                           gpu::Device* device, Inputs& inputs) {
  const bool coded = !codings.empty();
  std::vector<ReduceTensor> tensors;
  for (const Entry* entry : entries) {
    const Operation& o = *entry->operation;
    const uint32_t step = coded && o.lasting ? steps_[o.name]++ : 0;
    tensors.push_back({entry->in, entry->out, o.count(), hash_name(o.name), step});
    ReduceTensor& tensor = tensors.back();
    if (coded) tensor.spec = codings.at(tensors.size() - 1);
    tensor.place = entry->device();
    const double scale =
        o.args.prescale * o.args.postscale / (o.args.op == ReduceOp::kAverage ? size() : 1);
    std::vector<float> owed;  // to add to the input
    if (coded && o.coding->error_feedback && size() > 1) {
      owed = residuals_.attach(o.name, tensor.spec.bucket, scale, owners, device, tensor);
    } else if (is_sum(o.args.op) && facts(o.args.dtype).floating) {
      owed = residuals_.take(o.name, scale, tensor);
    }
    if (owed.empty()) continue;
    std::optional<HostCopy> copy;
    if (tensor.place != nullptr) {
      copy.emplace(*entry);
      copy->land();
    }
    const void* const in = copy ? copy->host().in : entry->in;
    inputs.push_back(sum_of(in, o.args.dtype, owed));
    tensor.in = inputs.back().data();
    tensor.place = nullptr;
  }
  return tensors;
}

void Reducer::record_quality(const std::vector<Entry*>& entries,
                             const std::vector<CodecSpec>& codings,
                             const std::vector<ReduceTensor>& tensors) {
  for (size_t i = 0; i < entries.size(); ++i) {
    const Operation& o = *entries[i]->operation;
    // On every rank alike, because the result is equal on all.
    if (!tensors[i].result_finite && tensors[i].residual) residuals_.forget(o.name);
    if (!o.coding || !o.lasting) continue;
    const auto coding = codings.empty() ? std::nullopt : std::optional<CodecSpec>(codings[i]);
    quality_.record(o.name, coding, o.args.dtype, tensors[i]);
  }
}

bool Reducer::checks_finite(const Operation& operation) const {
  return operation.check_finite && config_.nonfinite != NonFinite::kPropagate && !warned_;
}

std::vector<Outcome> Reducer::judge(const std::vector<Entry*>& entries,
                                    const std::vector<ReduceTensor>& tensors) {
  std::vector<Outcome> outcomes(entries.size());
  if (!checks_finite(*entries.front()->operation)) return outcomes;
  std::vector<std::string> names;
  for (const Entry* entry : entries) names.push_back(entry->operation->name);
  std::vector<std::string> messages = explain_nonfinite(communicator_, ranks_, names, tensors);
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].empty()) continue;
    if (config_.nonfinite == NonFinite::kError) {
      outcomes[i].fault = {ErrorKind::kNonFinite, messages[i] + kRemedy};
    } else if (!warned_) {
      warned_ = true;  // on every rank alike, because the messages are equal on all
      if (rank() == 0 && config_.log) config_.log(messages[i] + kGoesOn);
    }
  }
  return outcomes;
}

void QualityLog::record(const std::string& name, const std::optional<CodecSpec>& coding,
                        DType dtype, const ReduceTensor& tensor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TensorQuality& q = by_name_[name];
  q.coding = coding;
  q.count = tensor.count;
  q.code_bits = tensor.count > 0 ? code_bits(coding, dtype, tensor) : 0;
  q.wire_bytes = wire_bytes(coding, dtype, tensor);
  q.nmse = tensor.coded_energy > 0 ? tensor.coding_error / tensor.coded_energy : 0;
  q.nmse_sum += q.nmse;
  ++q.reductions;
}

double QualityLog::last_nmse(const std::string& name) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? 0 : it->second.nmse;
}

std::map<std::string, TensorQuality> QualityLog::all() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return by_name_;
}

}  // namespace qsgd
