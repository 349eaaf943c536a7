// The functions of TensorFlow's C API that the operations use, declared here and looked up in the
// process: one library serves every TensorFlow, and is built without one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsgd::tf {

struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeHandle;
struct TF_ShapeInferenceContext;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;

// As in tensorflow/c/tf_datatype.h; the numbers are also in saved models.
enum TF_DataType : int {
  TF_FLOAT = 1,
  TF_DOUBLE = 2,
  TF_INT32 = 3,
  TF_UINT8 = 4,
  TF_INT16 = 5,
  TF_INT8 = 6,
  TF_STRING = 7,
  TF_COMPLEX64 = 8,
  TF_INT64 = 9,
  TF_BOOL = 10,
  TF_BFLOAT16 = 14,
  TF_UINT16 = 17,
  TF_COMPLEX128 = 18,
  TF_HALF = 19,
  TF_VARIANT = 21,
  TF_UINT32 = 22,
  TF_UINT64 = 23,
};

// As in tensorflow/c/tf_status.h.
enum TF_Code : int {
  TF_OK = 0,
  TF_UNKNOWN = 2,
  TF_INVALID_ARGUMENT = 3,
  TF_FAILED_PRECONDITION = 9,
  TF_DATA_LOSS = 15,
};

using ShapeFunction = void(TF_ShapeInferenceContext*, TF_Status*);
using CreateFunction = void*(TF_OpKernelConstruction*);
using ComputeFunction = void(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using DeleteFunction = void(void*);
using FreeFunction = void(void* data, size_t size_bytes, void* argument);

// clang-format off
#define QSGD_TF_FUNCTIONS(X)                                                                       \
  X(NewStatus, TF_Status*, ())                                                                     \
  X(DeleteStatus, void, (TF_Status*))                                                              \
  X(SetStatus, void, (TF_Status*, TF_Code, const char*))                                           \
  X(GetCode, TF_Code, (const TF_Status*))                                                          \
  X(Message, const char*, (const TF_Status*))                                                      \
  X(NewTensor, TF_Tensor*,                                                                         \
    (TF_DataType, const int64_t*, int, void*, size_t, FreeFunction*, void*))                       \
  X(DeleteTensor, void, (TF_Tensor*))                                                              \
  X(TensorType, TF_DataType, (const TF_Tensor*))                                                   \
  X(NumDims, int, (const TF_Tensor*))                                                              \
  X(Dim, int64_t, (const TF_Tensor*, int))                                                         \
  X(TensorData, void*, (const TF_Tensor*))                                                         \
  X(TensorByteSize, size_t, (const TF_Tensor*))                                                    \
  X(NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                                \
  X(RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                             \
  X(OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                      \
  X(OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                     \
  X(OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                    \
  X(OpDefinitionBuilderSetIsStateful, void, (TF_OpDefinitionBuilder*, bool))                       \
  X(OpDefinitionBuilderSetShapeInferenceFunction, void,                                            \
    (TF_OpDefinitionBuilder*, ShapeFunction*))                                                     \
  X(NewShapeHandle, TF_ShapeHandle*, ())                                                           \
  X(DeleteShapeHandle, void, (TF_ShapeHandle*))                                                    \
  X(ShapeInferenceContextNumInputs, int64_t, (TF_ShapeInferenceContext*))                          \
  X(ShapeInferenceContextGetInput, void,                                                           \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                                 \
  X(ShapeInferenceContextSetOutput, void,                                                          \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                                 \
  X(ShapeInferenceContextSetUnknownShape, void, (TF_ShapeInferenceContext*, TF_Status*))           \
  X(NewAsyncKernelBuilder, TF_KernelBuilder*,                                                      \
    (const char*, const char*, CreateFunction*, ComputeFunction*, DeleteFunction*))                \
  X(RegisterKernelBuilder, void, (const char*, TF_KernelBuilder*, TF_Status*))                     \
  X(OpKernelConstruction_GetAttrSize, void,                                                        \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                       \
  X(OpKernelConstruction_GetAttrString, void,                                                      \
    (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))                            \
  X(OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                    \
  X(OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                              \
  X(GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                           \
  X(SetOutput, void, (TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*))                     \
  X(AllocateOutput, TF_Tensor*,                                                                    \
    (TF_OpKernelContext*, int, TF_DataType, const int64_t*, int, size_t, TF_Status*))              \
  X(ForwardInputOrAllocateOutput, TF_Tensor*,                                                      \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))
// clang-format on

// TF_NewStatus is api().NewStatus, etc.
struct Api {
#define QSGD_DECLARE(name, result, arguments) result(*name) arguments = nullptr;
  QSGD_TF_FUNCTIONS(QSGD_DECLARE)
#undef QSGD_DECLARE
};

// Missing functions are null; see missing_function().
const Api& api();
// The first function that this TensorFlow lacks, or null.
const char* missing_function();

}  // namespace qsgd::tf
