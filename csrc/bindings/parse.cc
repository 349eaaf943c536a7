#include <array>

#include "bindings/bindings.h"

namespace {

template <class T, size_t N>
T look_up(const char* what, const std::string& name,
          const std::array<std::pair<const char*, T>, N>& table) {
  std::string known;
  for (const auto& [key, value] : table) {
    if (name == key) return value;
    known += (known.empty() ? "" : ", ") + std::string(key);
  }
  throw qsgd::usage_error("unknown " + std::string(what) + " '" + name + "'; known are " + known);
}

}  // namespace

qsgd::DType parse_dtype(const std::string& name) {
  for (int i = 0; i < qsgd::kDTypes; ++i) {
    const auto dtype = static_cast<qsgd::DType>(i);
    if (name == qsgd::facts(dtype).name) return dtype;
  }
  throw qsgd::usage_error("element type '" + name +
                          "' cannot be reduced; use an integer, float16, bfloat16, float32 or "
                          "float64 tensor");
}

qsgd::ReduceOp parse_op(const std::string& name) {
  using Op = qsgd::ReduceOp;
  return look_up<Op, 5>("reduction", name,
                        {{{"sum", Op::kSum},
                          {"average", Op::kAverage},
                          {"min", Op::kMin},
                          {"max", Op::kMax},
                          {"product", Op::kProduct}}});
}

qsgd::Norm parse_norm(const std::string& name) {
  return look_up<qsgd::Norm, 2>("norm", name,
                                {{{"max", qsgd::Norm::kMax}, {"l2", qsgd::Norm::kL2}}});
}

qsgd::QuantSpec parse_spec(const Coding& coding) {
  const auto& [bits, bucket, norm] = *coding;
  const qsgd::QuantSpec spec{bits, parse_norm(norm), bucket};
  check(spec);
  return spec;
}
