#include "tensorflow/tensors.h"

#include <optional>

namespace qsgd::tf {
namespace {

std::optional<Form> computed(TF_DataType type) {
  switch (type) {
    case TF_FLOAT:
      return Form{DType::kFloat32};
    case TF_DOUBLE:
      return Form{DType::kFloat64};
    case TF_HALF:
      return Form{DType::kFloat16};
    case TF_BFLOAT16:
      return Form{DType::kBFloat16};
    case TF_UINT8:
    case TF_BOOL:
      return Form{DType::kUint8};
    case TF_INT8:
      return Form{DType::kInt8};
    case TF_INT16:
      return Form{DType::kInt16};
    case TF_INT32:
      return Form{DType::kInt32};
    case TF_INT64:
      return Form{DType::kInt64};
    case TF_COMPLEX64:
      return Form{DType::kFloat32, 2};
    case TF_COMPLEX128:
      return Form{DType::kFloat64, 2};
    default:
      return std::nullopt;
  }
}

// Types without arithmetic in the core are sent as others of the same size.
std::optional<Form> moved(TF_DataType type) {
  switch (type) {
    case TF_UINT16:
      return Form{DType::kInt16};
    case TF_UINT32:
      return Form{DType::kInt32};
    case TF_UINT64:
      return Form{DType::kInt64};
    default:
      return computed(type);
  }
}

// The name of a type that cannot be reduced or sent; its number if it has none here.
std::string name_of(TF_DataType type) {
  switch (type) {
    case TF_UINT16:
      return "uint16";
    case TF_UINT32:
      return "uint32";
    case TF_UINT64:
      return "uint64";
    case TF_STRING:
      return "string";
    case TF_VARIANT:
      return "variant";
    default:
      return "number " + std::to_string(type) + " of TensorFlow";
  }
}

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
  const std::optional<Form> form = computes ? computed(type) : moved(type);
  if (form) return *form;
  throw Failure(TF_INVALID_ARGUMENT, "tensors of type " + name_of(type) + " cannot be " +
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
