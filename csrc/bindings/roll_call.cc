#include "engine/roll_call.h"

#include "bindings/bindings.h"

namespace py = pybind11;

void bind_roll_call(py::module_& m) {
  using qsgd::RollCall;
  py::class_<RollCall>(m, "RollCall")
      .def(py::init([](std::string launch, std::string host, int rank, int ranks, int local_rank,
                       int local_size, double warning_s, double shutdown_s) {
             return std::make_unique<RollCall>(RollCall::Seat{std::move(launch), std::move(host),
                                                              rank, ranks, local_rank, local_size},
                                               warning_s, shutdown_s);
           }),
           py::kw_only(), py::arg("launch"), py::arg("host"), py::arg("rank"), py::arg("ranks"),
           py::arg("local_rank"), py::arg("local_size"), py::arg("warning_s"),
           py::arg("shutdown_s"))
      .def("end", &RollCall::end, py::call_guard<py::gil_scoped_release>());
}
