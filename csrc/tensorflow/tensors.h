// TensorFlow's tensors and statuses as owned values, and how the core sees a tensor.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "tensorflow/api.h"

namespace qsgd::tf {

class Failure : public std::runtime_error {
 public:
  Failure(TF_Code code, const std::string& what) : std::runtime_error(what), code_(code) {}
  TF_Code code() const { return code_; }

 private:
  TF_Code code_;
};

class Status {
 public:
  Status() : status_(api().NewStatus()) {}
  Status(TF_Code code, const char* message) : Status() {
    api().SetStatus(status_.get(), code, message);
  }
  operator TF_Status*() const { return status_.get(); }  // NOLINT: for passing on
  // Throws what TensorFlow has reported.
  void check() const;

 private:
  struct Delete {
    void operator()(TF_Status* status) const { api().DeleteStatus(status); }
  };
  std::unique_ptr<TF_Status, Delete> status_;
};

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { api().DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, DeleteTensor>;

using Shape = std::vector<int64_t>;

Shape shape_of(const TF_Tensor* tensor);

// In what type the core computes with a tensor, or moves it. `parts` of it make one element.
struct Form {
  DType dtype;
  int64_t parts = 1;
};

// Throws a failure for types that the core cannot add; moving works for all of fixed size.
Form form_of(TF_DataType type, bool computes);
// The shape as the core counts it, and back.
Shape with_parts(Shape shape, const Form& form);
Shape without_parts(Shape shape, const Form& form);

}  // namespace qsgd::tf
