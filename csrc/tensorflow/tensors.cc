#include "tensorflow/tensors.h"

#include <algorithm>
#include <array>
#include <optional>

namespace qsgd::tf {
namespace {

struct Known {
  TF_DataType type;
  const char* name;
  std::optional<Form> sent;  // empty: it has no fixed size
  bool computes = true;      // else it is sent as another type of the same size
};

constexpr std::array<Known, 17> kTypes{{
    {TF_FLOAT, "float", Form{DType::kFloat32}},
    {TF_DOUBLE, "double", Form{DType::kFloat64}},
    {TF_HALF, "half", Form{DType::kFloat16}},
    {TF_BFLOAT16, "bfloat16", Form{DType::kBFloat16}},
    {TF_UINT8, "uint8", Form{DType::kUint8}},
    {TF_BOOL, "bool", Form{DType::kUint8}},
    {TF_INT8, "int8", Form{DType::kInt8}},
    {TF_INT16, "int16", Form{DType::kInt16}},
    {TF_INT32, "int32", Form{DType::kInt32}},
    {TF_INT64, "int64", Form{DType::kInt64}},
    {TF_COMPLEX64, "complex64", Form{DType::kFloat32, 2}},
    {TF_COMPLEX128, "complex128", Form{DType::kFloat64, 2}},
    {TF_UINT16, "uint16", Form{DType::kInt16}, false},
    {TF_UINT32, "uint32", Form{DType::kInt32}, false},
    {TF_UINT64, "uint64", Form{DType::kInt64}, false},
    {TF_STRING, "string", std::nullopt, false},
    {TF_VARIANT, "variant", std::nullopt, false},
}};

}  // namespace

void Status::check() const {
  const TF_Code code = api().GetCode(status_.get());
  if (code != TF_OK) throw Failure(code, api().Message(status_.get()));
}

Shape shape_of(const TF_Tensor* tensor) {
  Shape shape;
  for (int i = 0; i < api().NumDims(tensor); ++i) shape.push_back(api().Dim(tensor, i));
  return shape;
}

Form form_of(TF_DataType type, bool computes) {
  const auto* const known = std::find_if(kTypes.begin(), kTypes.end(),
                                         [type](const Known& each) { return each.type == type; });
  const bool is_known = known != kTypes.end();
  if (is_known && known->sent && (known->computes || !computes)) return *known->sent;
  const std::string name =
      is_known ? known->name : "number " + std::to_string(type) + " of TensorFlow";
  throw Failure(TF_INVALID_ARGUMENT, "tensors of type " + name + " cannot be " +
                                         (computes ? "reduced; cast them to a signed integer"
                                                   : "sent; cast them to an integer") +
                                         " or floating type");
}

Shape with_parts(Shape shape, const Form& form) {
  if (form.parts != 1) shape.push_back(form.parts);
  return shape;
}

Shape without_parts(Shape shape, const Form& form) {
  if (form.parts != 1) shape.pop_back();
  return shape;
}

}  // namespace qsgd::tf
