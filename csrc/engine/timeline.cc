#include "engine/timeline.h"

#include <algorithm>
#include <cctype>

#include "common/error.h"

namespace qsgd {
namespace {

constexpr uint32_t kProgramRow = 1;  // some viewers do not show thread 0
constexpr uint32_t kCyclesRow = 2;
constexpr uint32_t kStepsRow = 3;
constexpr uint32_t kFirstTensorRow = 4;

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

TraceArgs facts_of(const Timeline::Work& work) {
  TraceArgs args;
  args.add("wire_bytes", work.wire_bytes).add("elements", work.elements).add("bits", work.bits);
  args.add("nmse", work.nmse).add("fused", work.fused).add("process_set", work.process_set);
  if (work.coding_s > 0) args.add("coding_us", 1e6 * work.coding_s);
  if (!work.algorithm.empty()) args.add("algorithm", work.algorithm);
  if (!work.error.empty()) args.add("error", work.error);
  return args;
}

}  // namespace

void Timeline::start(const std::string& path, bool mark_cycles, Clock::time_point zero) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (writer_) {
    throw usage_error("rank " + std::to_string(rank_) + ": start_timeline(" + path +
                      ") while a timeline is being written; call stop_timeline() first");
  }
  writer_ = std::make_unique<TraceWriter>(path, rank_, zero);
  mark_cycles_ = mark_cycles;
  zero_ = zero;
  rows_.clear();
  name_row(kProgramRow, "program");
  name_row(kStepsRow, "steps");
  if (mark_cycles) name_row(kCyclesRow, "cycles");
  on_ = true;
}

void Timeline::stop() {
  std::unique_ptr<TraceWriter> ended;  // destroyed last, without the lock: it waits for its thread
  const std::lock_guard<std::mutex> lock(mutex_);
  on_ = false;
  ended = std::move(writer_);
}

void Timeline::name_row(uint32_t number, const std::string& name) {
  writer_->add({'M', "thread_name", number, zero_, {}, TraceArgs().add("name", name)});
}

Timeline::Row& Timeline::row(const std::string& tensor) {
  const auto number = static_cast<uint32_t>(rows_.size()) + kFirstTensorRow;
  const auto [it, fresh] = rows_.try_emplace(tensor, Row{number, {}});
  if (fresh) name_row(number, tensor);
  return it->second;
}

void Timeline::arrived(const std::string& tensor, const std::string& operation, int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!writer_) return;
  Row& r = row(tensor);
  const auto now = Clock::now();
  if (r.negotiation.empty()) {
    r.negotiation = "NEGOTIATE_" + upper(operation);
    writer_->add({'B', r.negotiation, r.number, now});
  }
  TraceArgs args;
  args.add("rank", static_cast<uint64_t>(rank));
  writer_->add({'i', "rank " + std::to_string(rank), r.number, now, {}, std::move(args)});
}

void Timeline::agreed(const std::string& tensor, const std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!writer_) return;
  Row& r = row(tensor);
  r.agreed = Clock::now();
  if (r.negotiation.empty()) return;  // the negotiation began before the timeline
  TraceArgs args;
  if (!error.empty()) args.add("error", error);
  writer_->add({'E', r.negotiation, r.number, r.agreed, {}, std::move(args)});
  r.negotiation.clear();
}

void Timeline::done(const Work& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!writer_) return;
  Row& r = row(work.tensor);
  const auto now = Clock::now();
  const auto span = [&](const std::string& name, Clock::time_point from, Clock::time_point to,
                        TraceArgs args) {
    writer_->add({'X', name, r.number, from, to - from, std::move(args)});
  };
  if (r.agreed != Clock::time_point{}) span("QUEUE", r.agreed, work.begin, {});
  r.agreed = {};
  span(upper(work.operation), work.begin, now, facts_of(work));
  if (work.algorithm.empty()) return;
  span(upper(work.algorithm), work.exchange, work.exchange_end, {});
}

void Timeline::waited(Clock::time_point since) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (writer_) writer_->add({'X', "WAIT", kProgramRow, since, Clock::now() - since});
}

void Timeline::stepped(uint64_t step, Clock::time_point begin, Clock::time_point end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!writer_ || begin < zero_) return;  // incomplete steps are not shown
  writer_->add({'X', "STEP", kStepsRow, begin, end - begin, TraceArgs().add("step", step)});
}

void Timeline::cycle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (writer_ && mark_cycles_) {
    writer_->add({'i', "CYCLE_START", kCyclesRow, Clock::now()});
  }
}

}  // namespace qsgd
