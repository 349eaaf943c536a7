#include "bindings/bindings.h"
#include "jax/collective.h"

namespace py = pybind11;

void bind_jax(py::module_& m) {
  m.def(
      "xla_collective", [] { return py::capsule(reinterpret_cast<void*>(&qsgd::xla::collective)); },
      "Return the handler of all collectives, for jax.ffi.register_ffi_target.");
}
