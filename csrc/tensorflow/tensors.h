// Owning wrappers of TensorFlow's tensors and statuses, and the core's form of a tensor.
#pragma once

#include <memory>
#include <stdexcept>
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
  operator TF_Status*() const { return status_.get(); }  // NOLINT: implicit, for arguments
  // Throws the error that TensorFlow has reported.
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

// The type in which the core reduces or sends a tensor. `parts` of them make one element.
struct Form {
  DType dtype;
  int64_t parts = 1;
};

// Throws a failure for types that the core cannot reduce; all types of fixed size can be sent.
Form form_of(TF_DataType type, bool computes);
// Converts a shape to the core's form, and back.
Shape with_parts(Shape shape, const Form& form);
Shape without_parts(Shape shape, const Form& form);

}  // namespace qsgd::tf
