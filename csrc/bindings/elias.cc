// The paper's Elias coding over numpy arrays.
#include <pybind11/numpy.h>

#include <string_view>

#include "bindings/bindings.h"
#include "quant/elias_message.h"

namespace py = pybind11;

namespace qsgd {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

py::bytes encode_elias(const Floats& x, uint32_t levels, uint32_t bucket_size, bool sparse,
                       uint64_t seed, uint32_t tensor, uint32_t step, uint32_t rank) {
  const EliasSpec spec{levels, bucket_size, sparse};
  const NoiseKey key{seed, tensor, step, rank, Phase::kScatter};
  const float* const in = x.data();
  const auto count = static_cast<size_t>(x.size());
  std::vector<uint8_t> message;
  {
    const py::gil_scoped_release no_gil;
    message = elias_encode(in, count, spec, key);
  }
  return py::bytes(reinterpret_cast<const char*>(message.data()), message.size());
}

Floats decode_elias(const py::bytes& message, size_t count) {
  const std::string_view view = message;
  Floats out(static_cast<py::ssize_t>(count));
  float* const to = out.mutable_data();
  const py::gil_scoped_release no_gil;
  elias_decode(reinterpret_cast<const uint8_t*>(view.data()), view.size(), count, to);
  return out;
}

}  // namespace
}  // namespace qsgd

void bind_elias(py::module_& m) {
  m.def("elias_encode", &qsgd::encode_elias, py::arg("x"), py::kw_only(), py::arg("levels"),
        py::arg("bucket_size") = 512, py::arg("sparse") = true, py::arg("seed") = 0,
        py::arg("tensor") = 0, py::arg("step") = 0, py::arg("rank") = 0,
        "Code float32 elements in `levels` levels of each bucket's L2 norm, with Elias's omega "
        "code; the same key gives the same bytes.");
  m.def("elias_decode", &qsgd::decode_elias, py::arg("message"), py::kw_only(), py::arg("count"),
        "Decode what elias_encode wrote; refuses a message that is damaged.");
}
