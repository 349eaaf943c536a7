// qsgd_hpc._core: what Python sees of the core.
#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "common/error.h"

namespace py = pybind11;

namespace {

const char* class_of(qsgd::ErrorKind kind) {
  switch (kind) {
    case qsgd::ErrorKind::kUsage:
      return "UsageError";
    case qsgd::ErrorKind::kRankFailed:
      return "RankFailedError";
    case qsgd::ErrorKind::kNonFinite:
      return "NonFiniteGradientError";
    default:
      return "HorovodInternalError";
  }
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The compiled core of qsgd-hpc: codec, collectives, engine.";
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const qsgd::Error& error) {
      const py::object type = py::module_::import("qsgd_hpc.errors").attr(class_of(error.kind()));
      py::set_error(type, error.what());
    }
  });
  bind_spec(m);
  bind_operation(m);
  bind_engine(m);
  bind_codec(m);
  bind_threads(m);
  bind_bucket(m);
  bind_communicator(m);
  bind_planner(m);
  bind_jax(m);
  bind_gpu(m);
  bind_roll_call(m);
}
