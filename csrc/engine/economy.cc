#include "engine/economy.h"

#include <algorithm>

#include "planner/codec_timing.h"
#include "planner/codes.h"

namespace qsgd {
namespace {

constexpr int kWeighed = 16;         // reductions: a few steps of most models
constexpr size_t kMostSizes = 4096;  // limits the memory for programs with ever new sizes

template <class Value, class Make>
Value& remembered(std::map<size_t, Value>& by_count, size_t count, const Make& make) {
  const auto it = by_count.find(count);
  if (it != by_count.end()) return it->second;
  if (by_count.size() == kMostSizes) by_count.clear();
  return by_count.emplace(count, make()).first->second;
}

}  // namespace

void Economy::set(Machine machine, PlanRequest request, Workers* workers) {
  machine_ = std::move(machine);
  request_ = std::move(request);
  workers_ = workers;
}

bool Economy::wants_machine(const Operation& operation) const {
  if (machine_ || size_ == 1 || operation.set != 0 || operation.kind != OpKind::kAllreduce) {
    return false;
  }
  const std::optional<Coding>& coding = operation.coding;
  return coding && (coding->choice != Choice::kNothing || planning_ != Planning::kOff);
}

std::optional<CodecSpec> Economy::code_for(const std::optional<CodecSpec>& coding, Choice choice,
                                           size_t count) {
  if (choice == Choice::kNothing) return decide(coding, choice, count);
  if (!coding) return coding;
  if (size_ == 1) return std::nullopt;  // nothing is sent
  return machine_ ? choose_code(*coding, choice, count) : coding;
}

std::optional<CodecSpec> Economy::decide(const std::optional<CodecSpec>& coding, Choice choice,
                                         size_t count) {
  const bool may_drop = choice != Choice::kNothing || planning_ == Planning::kChoose;
  if (!machine_ || !coding || !may_drop) return coding;
  return choose_code(*coding, Choice::kNothing, count);
}

std::optional<CodecSpec> Economy::choose_code(const CodecSpec& spec, Choice choice, size_t count) {
  Known::Use& use = known(spec).of(choice);
  return remembered(use.chosen, count, [&] {
    PlanRequest request = request_;
    request.codecs = {spec};
    if (choice != Choice::kNothing) request.codecs = open_codes(spec, choice == Choice::kCode);
    for (const CodecSpec& candidate : request.codecs) known(candidate);  // times it
    const Plan plan = choose(*machine_, count, request);
    std::vector<std::optional<CodecSpec>>& reported = use.reported;
    if (std::find(reported.begin(), reported.end(), plan.spec) == reported.end()) {
      reported.push_back(plan.spec);
      news_.push_back("planner: with " +
                      (choice == Choice::kNothing ? describe(spec) : "bits=auto") + ", " +
                      std::to_string(count) + " elements are sent as " +
                      (plan.spec ? describe(*plan.spec) : "float32") + ": " + plan.reason);
    }
    return plan.spec;
  });
}

Algorithm Economy::algorithm_for(const std::optional<CodecSpec>& coding, size_t count) {
  if (!machine_ || planning_ != Planning::kChoose) return Algorithm::kAuto;
  return remembered(known(coding).algorithms, count, [&] {
    PlanRequest request = request_;
    const Prediction usual = fastest(*machine_, count, coding, request);
    request.any_algorithm = true;
    const Prediction best = fastest(*machine_, count, coding, request);
    const bool pays = best.seconds < usual.seconds * (1 - request.worth);
    return pays ? best.algorithm : Algorithm::kAuto;
  });
}

Economy::Known& Economy::known(const std::optional<CodecSpec>& spec) {
  for (const std::unique_ptr<Known>& seen : known_) {
    if (seen->spec == spec) return *seen;
  }
  known_.push_back(std::make_unique<Known>());
  known_.back()->spec = spec;
  const std::vector<CodecCost>& timed = machine_->codecs;
  const bool is_timed = std::any_of(timed.begin(), timed.end(), [&](const CodecCost& cost) {
    // The cost of QSGD hardly depends on the bits, and some of them are always measured.
    return !spec || (cost.spec.scheme == spec->scheme &&
                     (spec->scheme == Scheme::kQsgd || cost.spec.bits == spec->bits));
  });
  if (spec && !is_timed) machine_->codecs.push_back(time_codec(*spec, workers_));
  return *known_.back();
}

void Economy::weigh(const CodecSpec& spec, size_t count) {
  if (!machine_ || planning_ != Planning::kAdvise || weighed_.reductions == kWeighed) return;
  known(spec);
  weighed_.elements += static_cast<double>(count);
  weighed_.coded_s += fastest(*machine_, count, spec, request_).seconds;
  weighed_.exact_s += fastest(*machine_, count, std::nullopt, request_).seconds;
  if (++weighed_.reductions < kWeighed) return;
  if (weighed_.exact_s >= weighed_.coded_s * (1 - request_.worth)) return;
  news_.push_back(
      "planner: " + describe(spec) + " is used as asked, but costs time here: the first " +
      std::to_string(kWeighed) + " compressed reductions, of " +
      size_text(weighed_.elements * sizeof(float) / kWeighed) + " each on average, count as " +
      time_text(weighed_.coded_s) + ", and as float32 as " + time_text(weighed_.exact_s) +
      ". QSGD_PLANNER=on compresses only where that saves time; QSGD_PLANNER=off says nothing");
}

}  // namespace qsgd
