#include "engine/handle.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings/engine.h"

namespace py = pybind11;

namespace qsgd {

std::shared_ptr<py::object> hold(py::object object) {
  if (object.is_none()) return nullptr;
  return {new py::object(std::move(object)), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

namespace {

constexpr std::chrono::milliseconds kSignalCheck{100};

// Without the GIL, but wakes to let Ctrl-C through.
void wait_until_done(Handle& handle) {
  Engine::check_not_performing("an operation was waited for");
  const Waiting waiting(handle);
  while (true) {
    {
      const py::gil_scoped_release no_gil;
      if (handle.wait_for(kSignalCheck)) return;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

void add_done_callback(Handle& handle, py::object callback) {
  const std::shared_ptr<py::object> held = hold(std::move(callback));
  const py::gil_scoped_release no_gil;  // the engine may hold the handle's lock or wait for the GIL
  handle.when_done([held] {
    const py::gil_scoped_acquire gil;
    try {
      (*held)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("qsgd_hpc done callback");
    }
  });
}

// The core's own memory, which lives as long as the array.
py::array_t<uint8_t> output(const Handle& handle) {
  auto* const result = new std::shared_ptr<const Result>(handle.result());
  const py::capsule owner(
      result, [](void* held) { delete static_cast<std::shared_ptr<const Result>*>(held); });
  const Memory& memory = (*result)->output;
  return py::array_t<uint8_t>(static_cast<py::ssize_t>(memory.size()),
                              reinterpret_cast<const uint8_t*>(memory.data()), owner);
}

void wait_for(Handle& handle) {
  if (!handle.done()) wait_until_done(handle);
  handle.let_go();
  handle.check();
}

}  // namespace
}  // namespace qsgd

void bind_handle(py::module_& m) {
  using namespace qsgd;
  py::class_<Handle, std::shared_ptr<Handle>>(m, "Handle")
      .def("done", &Handle::done)
      .def("lost", &Handle::lost)
      .def("wait", &wait_for, "Wait until the operation is complete; raise what it ended with.")
      .def("add_done_callback", &add_done_callback, py::arg("callback"),
           "Call back once, from the engine's thread or at once if done already.")
      .def("output", &output, "The result's bytes, 64-byte aligned, owned by the array.")
      .def("shape", [](const Handle& handle) { return handle.result()->shape; })
      .def("sizes", [](const Handle& handle) { return handle.result()->sizes; })
      .def("result", [](const Handle& handle) { return handle.result()->value; });
}
