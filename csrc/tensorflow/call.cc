#include "tensorflow/call.h"

#include <atomic>
#include <cstring>

#include "common/error.h"

namespace qsgd::tf {
namespace {

std::atomic<const QsgdTable*> table{nullptr};

TF_Code code_of(int error) {
  switch (static_cast<ErrorKind>(error)) {
    case ErrorKind::kUsage:
      return TF_INVALID_ARGUMENT;
    case ErrorKind::kRankFailed:
      return TF_UNKNOWN;  // after "aborted", a MonitoredSession would retry forever
    case ErrorKind::kNonFinite:
      return TF_DATA_LOSS;
    default:
      return TF_FAILED_PRECONDITION;  // the ranks disagree
  }
}

Tensor input(TF_OpKernelContext* context, int index) {
  const Status status;
  TF_Tensor* tensor = nullptr;
  api().GetInput(context, index, &tensor, status);
  status.check();
  return Tensor(tensor);
}

Tensor allocate(TF_OpKernelContext* context, int index, TF_DataType type, const Shape& shape,
                size_t size_bytes) {
  const Status status;
  Tensor tensor(api().AllocateOutput(context, index, type, shape.data(),
                                     static_cast<int>(shape.size()), size_bytes, status));
  status.check();
  return tensor;
}

// As libstdc++'s std::_Manager_operation.
constexpr int kClone = 2, kDestroy = 3;

void release_result(void*, size_t, void* owner) { attached()->release(owner); }

}  // namespace

Done::Done(const TF_AsyncOpKernelDoneCallback* done) {
  const auto& given = *reinterpret_cast<const Function*>(done);
  function_ = given;
  given.manage(function_.functor, given.functor, kClone);
}

Done::~Done() { function_.manage(function_.functor, function_.functor, kDestroy); }

void attach(const QsgdTable* core) { table = core; }

const QsgdTable* attached() { return table; }

void Call::start(std::unique_ptr<Call> call, const std::vector<std::string>& operations,
                 bool computes, bool copies, bool splits) {
  auto kept = std::make_unique<Kept>();
  std::vector<QsgdTensor> tensors;
  try {
    if (attached() == nullptr) {
      throw Failure(TF_INVALID_ARGUMENT,
                    "this operation needs qsgd_hpc; import "
                    "qsgd_hpc.tensorflow and call init() first");
    }
    const int count = call->makes_ == Makes::kNumber ? 0 : static_cast<int>(operations.size());
    for (int i = 0; i < count; ++i) call->take(i, computes, copies, *kept);
    if (splits) call->take_splits(count);
    tensors = call->describe(operations);
  } catch (const Failure& failure) {
    call->fail(failure.code(), failure.what());
    return call->done_();
  }
  // From here on the core owns both, and may release them before start() returns.
  const QsgdCaller caller{kept.release(), [](void* kept) { delete static_cast<Kept*>(kept); },
                          call.release(),
                          [](void* context, const QsgdOutcome* outcome) {
                            const std::unique_ptr<Call> ended(static_cast<Call*>(context));
                            ended->finish(*outcome);
                          }};
  attached()->start(tensors.data(), tensors.size(), caller);
}

void Call::take(int index, bool computes, bool copies, Kept& kept) {
  Tensor tensor = input(context_, index);
  const TF_DataType type = api().TensorType(tensor.get());
  const Form form = form_of(type, computes);
  const Shape shape = shape_of(tensor.get());
  sent_.push_back({with_parts(shape, form), type, form, nullptr, nullptr});
  Sent& sent = sent_.back();
  if (makes_ == Makes::kInPlace) {
    tensor.reset();  // a tensor that is referenced here is not forwarded
    const Status status;
    int forwarded = -1;
    Tensor output(api().ForwardInputOrAllocateOutput(context_, &index, 1, index, shape.data(),
                                                     static_cast<int>(shape.size()), &forwarded,
                                                     status));
    status.check();
    sent.in = sent.out = api().TensorData(output.get());
    kept.push_back(std::move(output));
    if (forwarded == index) return;
    tensor = input(context_, index);
  }
  sent.in = api().TensorData(tensor.get());
  if (copies) std::memcpy(sent.out, sent.in, api().TensorByteSize(tensor.get()));
  kept.push_back(std::move(tensor));
}

void Call::take_splits(int index) {
  const Tensor tensor = input(context_, index);
  const auto* values = static_cast<const int64_t*>(api().TensorData(tensor.get()));
  splits_.assign(values, values + api().TensorByteSize(tensor.get()) / sizeof *values);
}

std::vector<QsgdTensor> Call::describe(const std::vector<std::string>& operations) const {
  static constexpr int64_t kNothing = 0;
  std::vector<QsgdTensor> tensors;
  for (size_t i = 0; i < operations.size(); ++i) {
    QsgdTensor t{};
    t.operation = operations[i].data();
    t.operation_bytes = operations[i].size();
    t.shape = &kNothing;
    t.dimensions = 1;
    if (makes_ != Makes::kNumber) {
      const Sent& sent = sent_[i];
      t.dtype = static_cast<uint8_t>(sent.form.dtype);
      t.shape = sent.shape.data();
      t.dimensions = sent.shape.size();
      t.in = sent.in;
      t.out = sent.out;
    }
    t.splits = splits_.data();
    t.splits_count = splits_.size();
    tensors.push_back(t);
  }
  return tensors;
}

void Call::finish(const QsgdOutcome& outcome) const {
  if (outcome.error != 0) {
    fail(code_of(outcome.error), outcome.message);
  } else {
    try {
      set_outputs(outcome);
    } catch (const Failure& failure) {
      fail(failure.code(), failure.what());
    }
  }
  done_();
}

void Call::set_outputs(const QsgdOutcome& outcome) const {
  const bool rows = makes_ == Makes::kRows || makes_ == Makes::kRowsCounts;
  const int count = static_cast<int>(outcome.count);
  if (makes_ == Makes::kRowsCounts) set_counts(count, outcome);
  if (makes_ == Makes::kNumber) set_number(outcome.results[0].value);
  for (int i = 0; i < count; ++i) {
    if (rows) {
      set_rows(i, outcome.results[i]);
    } else {
      attached()->release(outcome.results[i].owner);
    }
  }
}

// The core's memory becomes the output.
void Call::set_rows(int index, const QsgdResult& result) const {
  const Sent& sent = sent_[static_cast<size_t>(index)];
  const Shape shape = without_parts({result.shape, result.shape + result.dimensions}, sent.form);
  const Tensor tensor(api().NewTensor(sent.type, shape.data(), static_cast<int>(shape.size()),
                                      const_cast<void*>(result.data), result.size_bytes,
                                      &release_result, result.owner));
  const Status status;
  api().SetOutput(context_, index, tensor.get(), status);
  status.check();
}

void Call::set_counts(int index, const QsgdOutcome& outcome) const {
  const size_t ranks = outcome.results[0].sizes_count;
  const Shape shape{static_cast<int64_t>(outcome.count), static_cast<int64_t>(ranks)};
  const size_t row_bytes = ranks * sizeof(int64_t);
  const Tensor tensor = allocate(context_, index, TF_INT64, shape, outcome.count * row_bytes);
  auto* to = static_cast<char*>(api().TensorData(tensor.get()));
  for (size_t i = 0; i < outcome.count; ++i) {
    std::memcpy(to + i * row_bytes, outcome.results[i].sizes, row_bytes);
  }
}

void Call::set_number(int64_t value) const {
  const Tensor tensor = allocate(context_, 0, TF_INT32, {}, sizeof(int32_t));
  *static_cast<int32_t*>(api().TensorData(tensor.get())) = static_cast<int32_t>(value);
}

void Call::fail(TF_Code code, const char* message) const {
  const Status status(code, message);
  api().OpKernelContext_Failure(context_, status);
}

}  // namespace qsgd::tf
