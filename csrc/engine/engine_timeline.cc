// Records of executed operations in the engine's timeline.
#include <numeric>

#include "engine/engine.h"

namespace qsgd {
namespace {

// On the wire, with the scales of the buckets.
double bits_per_element(const Response& response, size_t i, DType dtype) {
  if (response.codings.empty()) return 8.0 * static_cast<double>(facts(dtype).size);
  const CodecSpec& coding = response.codings[i];
  return 8.0 * coding.mean_bytes(coding.bucket) / coding.bucket;
}

}  // namespace

// Splits the `wire_bytes` of fused tensors in proportion to the bits of their elements.
void Engine::note_work(const Work& done) {
  if (!timeline_->on()) return;
  const auto& [response, entries, outcomes, start, wire_bytes] = done;
  std::vector<double> bits;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Operation& o = *entries[i]->operation;
    bits.push_back(static_cast<double>(o.count()) * bits_per_element(response, i, o.args.dtype));
  }
  const double all_bits = std::accumulate(bits.begin(), bits.end(), 0.0);
  const Reducer& reducer = sets_.operations(response.set).reducer();
  const Exchange& exchange = reducer.last_exchange();
  for (size_t i = 0; i < entries.size(); ++i) {
    const Operation& o = *entries[i]->operation;
    Timeline::Work work;
    work.tensor = Timeline::row_of(response.set, o.name);
    work.process_set = static_cast<uint64_t>(response.set);
    work.operation = describe(o.kind);
    work.begin = start;
    work.elements = o.count();
    const double share = all_bits > 0 ? bits[i] / all_bits : 0;
    work.wire_bytes = static_cast<uint64_t>(share * static_cast<double>(wire_bytes));
    work.bits = bits_per_element(response, i, o.args.dtype);
    work.fused = entries.size();
    work.error = outcomes[i].fault.message;
    if (!response.codings.empty()) {
      work.nmse = reducer.quality().last_nmse(o.name);
      work.coding_s = share * exchange.coding_s;
    }
    if (o.kind == OpKind::kAllreduce) {
      work.algorithm = exchange.algorithm;
      work.exchange = exchange.begin;
      work.exchange_end = exchange.end;
    }
    timeline_->done(work);
  }
}

}  // namespace qsgd
