// Codes by their names, and the codec without collectives on numpy arrays: for tests, lessons and
// benchmarks.
#include <pybind11/numpy.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <array>
#include <limits>
#include <optional>

#include "bindings/bindings.h"
#include "quant/code.h"
#include "quant/kernels.h"
#include "quant/message.h"

namespace py = pybind11;

namespace {

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

namespace {

qsgd::Generator parse_generator(const std::string& name) {
  using G = qsgd::Generator;
  return look_up<G, 2>("generator", name, {{{"ars", G::kArs}, {"philox", G::kPhilox}}});
}

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

void bind_spec(py::module_& m) {
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

namespace qsgd {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Bytes = py::array_t<uint8_t, py::array::c_style | py::array::forcecast>;

// Elements of a contiguous array; `dtype` overrides numpy's type, which may not be bfloat16.
struct Elements {
  Elements(const py::array& x, const std::string& dtype)
      : type(parse_dtype(dtype.empty() ? std::string(py::str(x.dtype())) : dtype)),
        count(static_cast<size_t>(x.size())),
        data(x.data()) {
    if (!(x.flags() & py::array::c_style)) throw usage_error("the array must be contiguous");
    if (static_cast<size_t>(x.itemsize()) != facts(type).size) {
      throw usage_error("elements of " + std::to_string(x.itemsize()) + " bytes cannot be " +
                        facts(type).name);
    }
  }
  DType type;
  size_t count;
  const void* data;
};

void expect_size(const Bytes& message, size_t count, const CodecSpec& spec) {
  const auto got = static_cast<size_t>(message.size());
  const size_t wanted = message_bytes(count, spec);
  if (got == wanted) return;
  throw usage_error("message of " + std::to_string(got) + " bytes, expected " +
                    std::to_string(wanted) + " for " + std::to_string(count) + " elements");
}

using Left = std::optional<Floats>;

bool encode_into(const py::array& x, Bytes message, const CodecSpec& spec, uint64_t seed,
                 uint32_t tensor, uint32_t step, uint32_t rank, const std::string& dtype,
                 const std::string& generator, int threads, float by, Left left) {
  const Elements in(x, dtype);
  expect_size(message, in.count, spec);
  if (left && static_cast<size_t>(left->size()) != in.count) {
    throw usage_error("`left` has " + std::to_string(left->size()) + " elements, x has " +
                      std::to_string(in.count));
  }
  float* const kept = left ? left->mutable_data() : nullptr;
  uint8_t* const out = message.mutable_data();
  const NoiseKey key{seed, tensor, step, rank, Phase::kScatter, parse_generator(generator)};
  const py::gil_scoped_release no_gil;
  Workers workers(threads);
  return encode_message(in.data, in.type, in.count, spec, key, out, workers, by, kept);
}

Bytes encode_new(const py::array& x, const CodecSpec& spec, uint64_t seed, uint32_t tensor,
                 uint32_t step, uint32_t rank, const std::string& dtype,
                 const std::string& generator) {
  Bytes message(static_cast<py::ssize_t>(message_bytes(static_cast<size_t>(x.size()), spec)));
  encode_into(x, message, spec, seed, tensor, step, rank, dtype, generator, 1, 1, {});
  return message;
}

void decode_any(const Bytes& message, py::array out, const CodecSpec& spec,
                const std::string& dtype, bool add, int threads) {
  const Elements to(out, dtype);
  expect_size(message, to.count, spec);
  void* const data = out.mutable_data();
  const py::gil_scoped_release no_gil;
  Workers workers(threads);
  decode_message(message.data(), static_cast<size_t>(message.size()), to.count, spec, data, to.type,
                 add, workers);
}

Floats decode_new(const Bytes& message, size_t count, const CodecSpec& spec) {
  expect_size(message, count, spec);
  Floats out(static_cast<py::ssize_t>(count));
  decode_any(message, out, spec, "", false, 1);
  return out;
}

float max_abs(const Floats& x) {
  const auto most = kernels().max_magnitude(x.data(), static_cast<size_t>(x.size()));
  return most > kInfinity ? std::numeric_limits<float>::quiet_NaN() : bit_cast<float>(most);
}

void add_into(Floats y, const Floats& x) {
  if (y.size() != x.size()) {
    throw usage_error("arrays of " + std::to_string(y.size()) + " and " + std::to_string(x.size()) +
                      " elements cannot be added");
  }
  kernels().add(y.mutable_data(), x.data(), static_cast<size_t>(x.size()));
}

py::array_t<uint16_t> noise_array(uint64_t first_tile, size_t tiles, uint64_t seed, uint32_t tensor,
                                  uint32_t step, uint32_t rank, const std::string& generator) {
  py::array_t<uint16_t> out(static_cast<py::ssize_t>(tiles * kTile));
  noise({seed, tensor, step, rank, Phase::kScatter, parse_generator(generator)}, first_tile, tiles,
        out.mutable_data());
  return out;
}

}  // namespace
}  // namespace qsgd

void bind_codec(py::module_& m) {
  using namespace qsgd;
  const auto no_copy = [](const char* name) { return py::arg(name).noconvert(); };
  m.def("encode", &encode_new, py::arg("x"), py::kw_only(), py::arg("spec"), py::arg("seed") = 0,
        py::arg("tensor") = 0, py::arg("step") = 0, py::arg("rank") = 0, py::arg("dtype") = "",
        py::arg("generator") = "ars",
        "Code a contiguous floating array as one wire message; the same key gives the same bytes. "
        "dtype='bfloat16': a uint16 array contains the bits of such elements; "
        "generator='philox' draws the same noise as GPUs, slowly.");
  m.def(
      "encode_into", &encode_into, py::arg("x"), no_copy("message"), py::kw_only(), py::arg("spec"),
      py::arg("seed") = 0, py::arg("tensor") = 0, py::arg("step") = 0, py::arg("rank") = 0,
      py::arg("dtype") = "", py::arg("generator") = "ars", py::arg("threads") = 1,
      py::arg("by") = 1.0f, no_copy("left") = py::none(),
      "The same into a uint8 array of 32 + spec.bytes(x.size). Returns whether x was finite. With "
      "`left`, float32 of x.size: codes x * by + left, and replaces `left` by the coding error, "
      "for error feedback.");
  m.def("decode", &decode_new, py::arg("message"), py::kw_only(), py::arg("count"), py::arg("spec"),
        "Decode a wire message; throws if it is corrupt or has another format.");
  m.def(
      "decode_into",
      [](const Bytes& message, py::array y, const CodecSpec& spec, const std::string& dtype,
         int threads) { decode_any(message, std::move(y), spec, dtype, false, threads); },
      py::arg("message"), no_copy("y"), py::kw_only(), py::arg("spec"), py::arg("dtype") = "",
      py::arg("threads") = 1, "Decode into an array of any floating type.");
  m.def(
      "decode_add_into",
      [](const Bytes& message, Floats y, const CodecSpec& spec, int threads) {
        decode_any(message, std::move(y), spec, "", true, threads);
      },
      py::arg("message"), no_copy("y"), py::kw_only(), py::arg("spec"), py::arg("threads") = 1,
      "Add the decoded values to a float32 array.");
  m.def("max_abs", &max_abs, no_copy("x"),
        "The largest magnitude of a float32 array, NaN if it has any: the minimum of an encoder.",
        py::call_guard<py::gil_scoped_release>());
  m.def("add_into", &add_into, no_copy("y"), no_copy("x"), "y += x, float32.");
  m.def("noise", &noise_array, py::kw_only(), py::arg("first_tile"), py::arg("tiles"),
        py::arg("seed") = 0, py::arg("tensor") = 0, py::arg("step") = 0, py::arg("rank") = 0,
        py::arg("generator") = "ars", "The 16-bit rounding noise of tiles of 64 elements.");
  m.def("instruction_sets", &instruction_sets,
        "Instruction sets of this machine that the codec supports, fastest first.");
  m.def("use_instruction_set", &use_instruction_set, py::arg("name"),
        "Code with this instruction set: all give the same bytes. For tests and comparisons.");
}
