#include "jax/element_type.h"

#include <algorithm>
#include <array>

namespace qsgd::xla {
namespace {

template <class T>
void widen(const void* from, size_t count, int64_t* to) {
  const auto* const source = static_cast<const T*>(from);
  std::copy(source, source + count, to);
}

template <class T>
void narrow(const int64_t* from, size_t count, void* to) {
  std::transform(from, from + count, static_cast<T*>(to),
                 [](int64_t n) { return static_cast<T>(n); });
}

template <class T>
constexpr Widening kWidening{&widen<T>, &narrow<T>};

struct Known {
  int32_t type;  // XLA's number
  const char* name;
  DType dtype;  // in which it is sent
  bool arithmetic;
  int64_t parts = 1;                   // elements of `dtype` per element
  const Widening* widening = nullptr;  // for averages
  bool always = false;                 // for all reductions
};

constexpr std::array<Known, 22> kTypes = {{
    {1, "bool", DType::kUint8, true},
    {2, "int8", DType::kInt8, true, 1, &kWidening<int8_t>},
    {3, "int16", DType::kInt16, true, 1, &kWidening<int16_t>},
    {4, "int32", DType::kInt32, true, 1, &kWidening<int32_t>},
    {5, "int64", DType::kInt64, true},
    {6, "uint8", DType::kUint8, true, 1, &kWidening<uint8_t>},
    {7, "uint16", DType::kInt16, true, 1, &kWidening<uint16_t>, true},
    {8, "uint32", DType::kInt32, true, 1, &kWidening<uint32_t>, true},
    {9, "uint64", DType::kInt64, false},
    {10, "float16", DType::kFloat16, true},
    {11, "float32", DType::kFloat32, true},
    {12, "float64", DType::kFloat64, true},
    {15, "complex64", DType::kFloat32, true, 2},
    {16, "bfloat16", DType::kBFloat16, true},
    {18, "complex128", DType::kFloat64, true, 2},
    {19, "float8_e5m2", DType::kUint8, false},
    {20, "float8_e4m3fn", DType::kUint8, false},
    {23, "float8_e4m3b11fnuz", DType::kUint8, false},
    {24, "float8_e5m2fnuz", DType::kUint8, false},
    {25, "float8_e4m3fnuz", DType::kUint8, false},
    {28, "float8_e4m3", DType::kUint8, false},
    {29, "float8_e3m4", DType::kUint8, false},
}};

const Known& known(int32_t type) {
  const auto* at = std::find_if(kTypes.begin(), kTypes.end(),
                                [type](const Known& each) { return each.type == type; });
  if (at == kTypes.end()) {
    throw usage_error("XLA's element type " + std::to_string(type) +
                      " is not supported; convert the array with astype()");
  }
  return *at;
}

}  // namespace

Conversion conversion(const Buffer& buffer, const Operation& operation) {
  const Known& type = known(buffer.type);
  Conversion t{type.dtype, {buffer.extents, buffer.extents + buffer.dimensions}};
  if (type.parts > 1) t.shape.push_back(type.parts);
  if (!reduces(operation.kind)) return t;
  if (!type.arithmetic) {
    throw usage_error("'" + operation.name + "' has elements of type " + type.name +
                      ", which cannot be reduced; convert the array with astype()");
  }
  if (type.always || operation.args.op == ReduceOp::kAverage) t.widening = type.widening;
  if (t.widening != nullptr) t.dtype = DType::kInt64;
  return t;
}

}  // namespace qsgd::xla
