#include "jax/element_type.h"

#include <algorithm>
#include <array>

namespace qsgd::xla {
namespace {

// XLA's numbers.
enum Type : int32_t {
  kPred = 1,
  kS8 = 2,
  kS16 = 3,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kU16 = 7,
  kU32 = 8,
  kU64 = 9,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kC64 = 15,
  kBF16 = 16,
  kC128 = 18,
};

struct Known {
  int32_t type;
  const char* name;
  DType dtype;  // in which it is sent
  bool arithmetic;
  int64_t parts;  // elements of `dtype` per element
};

constexpr std::array<Known, 22> kTypes = {{
    {kPred, "bool", DType::kUint8, true, 1},
    {kS8, "int8", DType::kInt8, true, 1},
    {kS16, "int16", DType::kInt16, true, 1},
    {kS32, "int32", DType::kInt32, true, 1},
    {kS64, "int64", DType::kInt64, true, 1},
    {kU8, "uint8", DType::kUint8, true, 1},
    {kU16, "uint16", DType::kInt16, true, 1},
    {kU32, "uint32", DType::kInt32, true, 1},
    {kU64, "uint64", DType::kInt64, false, 1},
    {kF16, "float16", DType::kFloat16, true, 1},
    {kF32, "float32", DType::kFloat32, true, 1},
    {kF64, "float64", DType::kFloat64, true, 1},
    {kC64, "complex64", DType::kFloat32, true, 2},
    {kBF16, "bfloat16", DType::kBFloat16, true, 1},
    {kC128, "complex128", DType::kFloat64, true, 2},
    {19, "float8_e5m2", DType::kUint8, false, 1},
    {20, "float8_e4m3fn", DType::kUint8, false, 1},
    {23, "float8_e4m3b11fnuz", DType::kUint8, false, 1},
    {24, "float8_e5m2fnuz", DType::kUint8, false, 1},
    {25, "float8_e4m3fnuz", DType::kUint8, false, 1},
    {28, "float8_e4m3", DType::kUint8, false, 1},
    {29, "float8_e3m4", DType::kUint8, false, 1},
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

bool must_widen(int32_t type, ReduceOp op) {
  if (type == kU16 || type == kU32) return true;
  const bool narrow = type == kS8 || type == kS16 || type == kS32 || type == kU8;
  return narrow && op == ReduceOp::kAverage;
}

template <class F>
void with_integer(int32_t type, F&& f) {
  switch (type) {
    case kS8:
      return f(int8_t{});
    case kS16:
      return f(int16_t{});
    case kS32:
      return f(int32_t{});
    case kU8:
      return f(uint8_t{});
    case kU16:
      return f(uint16_t{});
    case kU32:
      return f(uint32_t{});
    default:
      throw internal_error("XLA's element type " + std::to_string(type) + " is not widened");
  }
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
  t.widened = must_widen(buffer.type, operation.args.op);
  if (t.widened) t.dtype = DType::kInt64;
  return t;
}

void widen(int32_t type, const void* from, size_t count, int64_t* to) {
  with_integer(type, [&](auto example) {
    const auto* const source = static_cast<const decltype(example)*>(from);
    std::copy(source, source + count, to);
  });
}

void narrow(int32_t type, const int64_t* from, size_t count, void* to) {
  with_integer(type, [&](auto example) {
    using T = decltype(example);
    std::transform(from, from + count, static_cast<T*>(to),
                   [](int64_t n) { return static_cast<T>(n); });
  });
}

}  // namespace qsgd::xla
