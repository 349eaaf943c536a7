#include <pybind11/operators.h>

#include <array>

#include "bindings/bindings.h"
#include "quant/code.h"

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

// All values of an enumeration, with their names from describe().
template <class T, int N>
std::array<std::pair<const char*, T>, N> described() {
  std::array<std::pair<const char*, T>, N> all;
  for (int i = 0; i < N; ++i) {
    const auto value = static_cast<T>(i);
    all[static_cast<size_t>(i)] = {describe(value), value};
  }
  return all;
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
  return look_up("reduction", name, described<qsgd::ReduceOp, qsgd::kReduceOps>());
}

qsgd::OpKind parse_kind(const std::string& name) {
  return look_up("operation", name, described<qsgd::OpKind, qsgd::kOpKinds>());
}

qsgd::Generator parse_generator(const std::string& name) {
  using G = qsgd::Generator;
  return look_up<G, 2>("generator", name, {{{"ars", G::kArs}, {"philox", G::kPhilox}}});
}

namespace {

qsgd::Norm parse_norm(const std::string& name) {
  return look_up<qsgd::Norm, 2>("norm", name,
                                {{{"max", qsgd::Norm::kMax}, {"l2", qsgd::Norm::kL2}}});
}

qsgd::Rounding parse_rounding(const std::string& name) {
  using R = qsgd::Rounding;
  return look_up<R, 2>("rounding", name,
                       {{{"stochastic", R::kStochastic}, {"nearest", R::kNearest}}});
}

}  // namespace

void bind_spec(pybind11::module_& m) {
  namespace py = pybind11;
  using qsgd::CodecSpec;
  m.attr("SCHEMES") = py::tuple(py::cast(qsgd::code_names()));
  py::class_<CodecSpec>(m, "CodecSpec")
      .def(py::init([](const std::string& scheme, std::optional<int> bits, uint32_t bucket_size,
                       const std::string& norm, const std::string& rounding, uint32_t k,
                       bool contract) {
             CodecSpec spec;
             spec.scheme = qsgd::parse_scheme(scheme);
             const qsgd::CodeTraits& traits = qsgd::traits_of(spec.scheme);
             spec.bits = bits.value_or(traits.has_choice() ? spec.bits : traits.most_bits);
             spec.norm = parse_norm(norm);
             spec.rounding = parse_rounding(rounding);
             spec.bucket = bucket_size;
             spec.k = k;
             spec.contract = contract;
             check(spec);
             return spec;
           }),
           py::kw_only(), py::arg("scheme") = "qsgd", py::arg("bits") = py::none(),
           py::arg("bucket_size") = 512, py::arg("norm") = "max",
           py::arg("rounding") = "stochastic", py::arg("k") = 0, py::arg("contract") = false)
      .def_property_readonly(
          "scheme", [](const CodecSpec& spec) { return qsgd::traits_of(spec.scheme).name; })
      .def_readonly("bits", &CodecSpec::bits)
      .def_readonly("bucket_size", &CodecSpec::bucket)
      .def_property_readonly("biased", &qsgd::biased)
      .def("bytes", &CodecSpec::bytes, py::arg("count"),
           "Bytes of the scales and codes of `count` elements; the maximum if lengths vary.")
      .def("mean_bytes", &CodecSpec::mean_bytes, py::arg("count"),
           "Mean number of these bytes on the wire; differs only if lengths vary.")
      .def(py::self == py::self)
      .def("__repr__", [](const CodecSpec& spec) { return describe(spec); });
}
