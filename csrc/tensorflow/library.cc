// The operations, registered when TensorFlow loads this library.
#include <array>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tensorflow/call.h"

namespace qsgd::tf {
namespace {

struct Operation {
  const char* name;
  const char* inputs;  // or null
  const char* outputs;
  const char* more_inputs;
  const char* more_outputs;
  Makes makes;
  bool computes;
  bool copies;
};

// Variadic, so that many small tensors are one operation of the graph. `operations` contains the
// result of qsgd_hpc._core.Operation.text() for each tensor, separated by spaces.
constexpr std::array<Operation, 6> kOperations{{
    {"QsgdAllreduce", "tensors: T", "reduced: T", nullptr, nullptr, Makes::kInPlace, true, false},
    {"QsgdBroadcast", "tensors: T", "received: T", nullptr, nullptr, Makes::kInPlace, false, true},
    {"QsgdAllgather", "tensors: T", "gathered: T", nullptr, "rows: int64", Makes::kRowsCounts,
     false, false},
    {"QsgdReducescatter", "tensors: T", "shares: T", nullptr, nullptr, Makes::kRows, true, false},
    {"QsgdAlltoall", "tensors: T", "received: T", "splits: int64", "rows: int64",
     Makes::kRowsCounts, false, false},
    {"QsgdJoin", nullptr, "last: int32", nullptr, nullptr, Makes::kNumber, false, false},
}};

struct Kernel {
  const Operation* operation;
  std::vector<std::string> operations;
};

// One string, split at spaces: TensorFlow's cache of eager kernels considers attributes that are
// lists of strings equal.
std::vector<std::string> read_operations(TF_OpKernelConstruction* construction) {
  int32_t count = 0;
  int32_t size_bytes = 0;
  const Status status;
  api().OpKernelConstruction_GetAttrSize(construction, "operations", &count, &size_bytes, status);
  status.check();
  std::string all(static_cast<size_t>(size_bytes), ' ');
  api().OpKernelConstruction_GetAttrString(construction, "operations", all.data(), all.size(),
                                           status);
  status.check();
  std::istringstream words(all);
  return {std::istream_iterator<std::string>(words), {}};
}

void* create(const Operation& operation, TF_OpKernelConstruction* construction) {
  try {
    return new Kernel{&operation, read_operations(construction)};
  } catch (const Failure& failure) {
    const Status status(failure.code(), failure.what());
    api().OpKernelConstruction_Failure(construction, status);
    return nullptr;
  }
}

void compute(void* self, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const auto& kernel = *static_cast<const Kernel*>(self);
  const Operation& operation = *kernel.operation;
  Call::start(std::make_unique<Call>(context, done, operation.makes), kernel.operations,
              operation.computes, operation.copies, operation.more_inputs != nullptr);
}

void destroy(void* self) { delete static_cast<Kernel*>(self); }

// Results have the inputs' shapes, or shapes that depend on all ranks.
void infer_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  for (int i = 0; i < api().ShapeInferenceContextNumInputs(context); ++i) {
    TF_ShapeHandle* shape = api().NewShapeHandle();
    api().ShapeInferenceContextGetInput(context, i, shape, status);
    if (api().GetCode(status) == TF_OK) {
      api().ShapeInferenceContextSetOutput(context, i, shape, status);
    }
    api().DeleteShapeHandle(shape);
  }
}

void know_no_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  api().ShapeInferenceContextSetUnknownShape(context, status);
}

void define(const Operation& operation) {
  TF_OpDefinitionBuilder* builder = api().NewOpDefinitionBuilder(operation.name);
  if (operation.inputs != nullptr) {
    api().OpDefinitionBuilderAddAttr(builder, "T: list(type) >= 1");
    api().OpDefinitionBuilderAddInput(builder, operation.inputs);
  }
  if (operation.more_inputs != nullptr) {
    api().OpDefinitionBuilderAddInput(builder, operation.more_inputs);
  }
  api().OpDefinitionBuilderAddOutput(builder, operation.outputs);
  if (operation.more_outputs != nullptr) {
    api().OpDefinitionBuilderAddOutput(builder, operation.more_outputs);
  }
  api().OpDefinitionBuilderAddAttr(builder, "operations: string");
  // Prevents constant folding, merging with equal operations, and removal.
  api().OpDefinitionBuilderSetIsStateful(builder, true);
  const bool keeps_shape = operation.makes == Makes::kInPlace;
  api().OpDefinitionBuilderSetShapeInferenceFunction(builder,
                                                     keeps_shape ? &infer_shapes : &know_no_shapes);
  const Status status;
  api().RegisterOpDefinition(builder, status);
}

template <size_t index>
void register_operation() {
  static constexpr const Operation& kOperation = kOperations[index];
  define(kOperation);
  TF_KernelBuilder* builder = api().NewAsyncKernelBuilder(
      kOperation.name, "CPU",
      [](TF_OpKernelConstruction* construction) { return create(kOperation, construction); },
      &compute, &destroy);
  const Status status;
  api().RegisterKernelBuilder(kOperation.name, builder, status);
}

template <size_t... indices>
void register_all(std::index_sequence<indices...>) {
  (register_operation<indices>(), ...);
}

// TensorFlow has no entry point for libraries of operations: they register on load.
[[gnu::constructor]] void on_load() {
  if (missing_function() != nullptr) return;
  register_all(std::make_index_sequence<kOperations.size()>());
}

}  // namespace
}  // namespace qsgd::tf

extern "C" {

// Returns the first missing function of TensorFlow's C API, or null. If one is missing, no
// operations are registered.
[[gnu::visibility("default")]] const char* qsgd_tensorflow_missing() {
  return qsgd::tf::missing_function();
}

// Sets the core. Returns whether this library supports the version of its table.
[[gnu::visibility("default")]] int qsgd_tensorflow_attach(const QsgdTable* table) {
  if (table->version != kQsgdTableVersion) return 0;
  qsgd::tf::attach(table);
  return 1;
}

}  // extern "C"
