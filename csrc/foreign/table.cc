#include "foreign/table.h"

#include "foreign/foreign.h"

namespace qsgd {
namespace {

using Owner = std::shared_ptr<const Result>;

ForeignTensor read(const QsgdTensor& from) {
  ForeignTensor t{of_text(from.operation, from.operation_bytes), from.in, from.out};
  t.operation.args.dtype = static_cast<DType>(from.dtype);
  t.operation.shape.assign(from.shape, from.shape + from.dimensions);
  t.operation.splits.assign(from.splits, from.splits + from.splits_count);
  return t;
}

QsgdResult hand_over(Owner result) {
  const Result& r = *result;
  return {new Owner(std::move(result)),
          r.output.data(),
          r.output.size(),
          r.shape.data(),
          r.shape.size(),
          r.sizes.data(),
          r.sizes.size(),
          r.value};
}

void finish(const QsgdCaller& caller, const Error* error, const Handles& handles) {
  if (error != nullptr) {
    const QsgdOutcome failed{static_cast<int>(error->kind()), error->what(), nullptr, 0};
    return caller.done(caller.context, &failed);
  }
  std::vector<QsgdResult> results;
  for (const auto& handle : handles) results.push_back(hand_over(handle->result()));
  const QsgdOutcome outcome{0, "", results.data(), results.size()};
  caller.done(caller.context, &outcome);
}

void start(const QsgdTensor* tensors, size_t count, QsgdCaller caller) {
  const std::shared_ptr<void> keep(caller.keep, caller.release);
  try {
    std::vector<ForeignTensor> read_tensors;
    for (size_t i = 0; i < count; ++i) read_tensors.push_back(read(tensors[i]));
    start_foreign(
        std::move(read_tensors), keep,
        [caller](const Error* error, const Handles& handles) { finish(caller, error, handles); });
  } catch (const Error& error) {
    finish(caller, &error, {});
  }
}

void release(void* owner) { delete static_cast<Owner*>(owner); }

}  // namespace

const QsgdTable& foreign_table() {
  static constexpr QsgdTable kTable{kQsgdTableVersion, &start, &release};
  return kTable;
}

}  // namespace qsgd
