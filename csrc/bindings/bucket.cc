// Averages of gradient buckets whose messages Python carries, given as addresses: torch tensors
// come without a copy, and nothing is allocated per reduction.
#include <pybind11/stl.h>

#include <memory>

#include "bindings/bindings.h"
#include "collectives/bucket_coder.h"

namespace py = pybind11;

namespace qsgd {
namespace {

using Address = uintptr_t;

template <class T>
T* at_address(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT: what torch's data_ptr() is for
}

// Several coders share the workers, one at a time.
class Coder {
 public:
  Coder(const std::vector<BucketTensor>& tensors, const std::string& dtype, uint64_t seed, int rank,
        int size, size_t limit, std::shared_ptr<Workers> workers)
      : workers_(std::move(workers)),
        coder_(tensors, parse_dtype(dtype), seed, rank, size, limit, workers_.get()) {}

  BucketCoder& operator*() { return coder_; }

 private:
  const std::shared_ptr<Workers> workers_;
  BucketCoder coder_;
};

BucketTensor tensor_of(size_t at, size_t count, uint32_t id, const OptionalSpec& spec,
                       Address residual, Address owner_residual) {
  return {at, count, id, spec, at_address<float>(residual), at_address<float>(owner_residual)};
}

void bind_tensor(py::module_& m) {
  py::class_<BucketTensor>(m, "BucketTensor")
      .def(py::init(&tensor_of), py::kw_only(), py::arg("at"), py::arg("count"), py::arg("id"),
           py::arg("spec") = py::none(), py::arg("residual") = 0, py::arg("owner_residual") = 0,
           "A tensor of a bucket; residuals are addresses of float32, or 0.");
  m.def(
      "owned_elements", &owned_elements, py::arg("count"), py::kw_only(), py::arg("spec"),
      py::arg("id"), py::arg("size"), py::arg("rank"),
      "The first element of a tensor whose sums the rank codes, and that after the last: what its "
      "owner_residual is of.");
}

}  // namespace
}  // namespace qsgd

void bind_bucket(py::module_& m) {
  using namespace qsgd;
  using Free = py::call_guard<py::gil_scoped_release>;
  bind_tensor(m);
  py::class_<Workers, std::shared_ptr<Workers>>(m, "Workers")
      .def(py::init<int>(), py::arg("threads"));
  py::class_<Coder>(m, "BucketCoder",
                    "Codes the average of a bucket: begin, then encode, reduce and decode of each "
                    "wave. Arguments are addresses; csrc/collectives/bucket_coder.h has the rest.")
      .def(py::init<const std::vector<BucketTensor>&, const std::string&, uint64_t, int, int,
                    size_t, std::shared_ptr<Workers>>(),
           py::arg("tensors"), py::kw_only(), py::arg("dtype"), py::arg("seed"), py::arg("rank"),
           py::arg("size"), py::arg("limit") = 0, py::arg("workers"))
      .def_property_readonly("waves", [](Coder& c) { return (*c).waves(); })
      .def(
          "bytes", [](Coder& c, size_t wave, int owner) { return (*c).bytes(wave, owner); },
          py::arg("wave"), py::arg("owner"))
      .def(
          "begin",
          [](Coder& c, Address bucket, const std::vector<uint32_t>& steps) {
            (*c).begin(at_address<void>(bucket), steps);
          },
          py::arg("bucket"), py::arg("steps"))
      .def(
          "encode",
          [](Coder& c, size_t wave, Address messages) {
            (*c).encode(wave, at_address<uint8_t>(messages));
          },
          py::arg("wave"), py::arg("messages"), Free())
      .def(
          "reduce",
          [](Coder& c, size_t wave, Address messages, Address result) {
            (*c).reduce(wave, at_address<uint8_t>(messages), at_address<uint8_t>(result));
          },
          py::arg("wave"), py::arg("messages"), py::arg("result"), Free())
      .def(
          "decode",
          [](Coder& c, size_t wave, Address results, size_t stride) {
            (*c).decode(wave, at_address<uint8_t>(results), stride);
          },
          py::arg("wave"), py::arg("results"), py::arg("stride"), Free())
      .def("quality", [](Coder& c) {
        const Quality all = (*c).quality();
        return py::make_tuple(all.error, all.energy);
      });
}
