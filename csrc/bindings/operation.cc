// Operations, Engine.start() and start_all(), and handles.
#include "engine/operation.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "common/kept.h"
#include "engine/handle.h"
#include "foreign/foreign.h"
#include "jax/collective.h"

namespace py = pybind11;

namespace qsgd {
namespace {

// Conversion of field values from and to Python.

template <class T>
void take(const py::handle& given, T& value) {
  value = given.cast<T>();
}
void take(const py::handle& given, OpKind& kind) { kind = parse_kind(given.cast<std::string>()); }
void take(const py::handle& given, DType& dtype) { dtype = parse_dtype(given.cast<std::string>()); }
void take(const py::handle& given, ReduceOp& op) { op = parse_op(given.cast<std::string>()); }

template <class T>
py::object give(const T& value) {
  return py::cast(value);
}
py::object give(OpKind kind) { return py::cast(describe(kind)); }
py::object give(DType dtype) { return py::cast(facts(dtype).name); }
py::object give(ReduceOp op) { return py::cast(describe(op)); }

std::string in_python(const py::handle& value) { return py::repr(value).cast<std::string>(); }

// Returns an operation with some values replaced.
Operation with(Operation operation, const py::kwargs& values) {
  size_t known = 0;
  visit_fields([&](const Field& field, auto get) {
    const py::handle given = PyDict_GetItemString(values.ptr(), field.name);
    if (!given) return;
    ++known;
    try {
      take(given, get(operation));
    } catch (const py::cast_error&) {
      throw py::type_error(std::string("an operation's ") + field.name + " cannot be " +
                           in_python(given));
    }
  });
  if (known == values.size()) {
    std::sort(operation.ranks.begin(), operation.ranks.end());  // so that equal sets compare equal
    return operation;
  }
  std::string names;
  const py::dict unknown = values.attr("copy")();
  visit_fields([&](const Field& field, auto) {
    names += std::string(" ") + field.name;
    unknown.attr("pop")(field.name, py::none());
  });
  throw py::type_error("an operation has no " + in_python(py::list(unknown)) + "; its fields are" +
                       names);
}

py::object value_of(const Operation& operation, const std::string& name) {
  py::object value;
  visit_fields([&](const Field& field, auto get) {
    if (name == field.name) value = give(get(operation));
  });
  if (!value) throw py::attribute_error("an operation has no '" + name + "'");
  return value;
}

std::string repr(const Operation& operation) {
  static const Operation usual;
  std::string text;
  visit_fields([&](const Field& field, auto get) {
    if (get(operation) == get(usual) && field.name != std::string("kind")) return;
    text += (text.empty() ? "" : ", ") + std::string(field.name) + "=" +
            in_python(give(get(operation)));
  });
  return "Operation(" + text + ")";
}

constexpr std::chrono::milliseconds kSignalCheck{100};

// Blocks without the GIL, but wakes up regularly for Ctrl-C.
void wait_until_done(Handle& handle) {
  Engine::check_not_driving("an operation was waited for");
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

// Returns the core's memory without a copy; it exists as long as the array.
py::array_t<uint8_t> output(const Handle& handle) {
  if (!handle.result()->is_on_host()) throw internal_error("the result is in a device's memory");
  auto* const result = new std::shared_ptr<const Result>(handle.result());
  const py::capsule owner(
      result, [](void* held) { delete static_cast<std::shared_ptr<const Result>*>(held); });
  const Memory& memory = (*result)->output;
  return py::array_t<uint8_t>(static_cast<py::ssize_t>(memory.size()),
                              reinterpret_cast<const uint8_t*>(memory.data()), owner);
}

// Copies the result of a tensor on a device, in stream order, and waits for the copy.
void copy_output(const Handle& handle, std::uintptr_t address, std::uintptr_t stream) {
  // If the job ends, the copy may be in flight.
  const KeptOnFailure<std::shared_ptr<const Result>> kept{handle.result()};
  const Result& result = **kept;
  if (result.device == nullptr) throw internal_error("the tensor was in host memory");
  if (result.size_bytes() == 0) return;
  gpu::Device& device = *result.device;
  const auto queue = reinterpret_cast<gpu::Stream>(stream);
  const gpu::Device::Use here(device);
  device.require(device.library().copy(reinterpret_cast<void*>(address), result.data(),
                                       result.size_bytes(), queue));
  device.await(*device.mark(queue));
}

void wait_for(Handle& handle) {
  if (!handle.done()) wait_until_done(handle);
  handle.release_memory();
  handle.check();
}

// Whether a signal has arrived whose handler raised an exception.
bool handler_raised() {
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

TensorMemory memory_of(std::uintptr_t source, std::uintptr_t target, py::object keep) {
  return {reinterpret_cast<const void*>(source), reinterpret_cast<void*>(target),
          hold(std::move(keep))};
}

// Marks the work queued so far in streams; tensors on the same stream share a mark.
class Marks {
 public:
  explicit Marks(Engine& engine) : engine_(engine) {}

  std::shared_ptr<gpu::Mark> mark(int device, std::uintptr_t stream) {
    if (device < 0) return nullptr;
    std::shared_ptr<gpu::Mark>& mark = marks_[{device, stream}];
    if (mark == nullptr) mark = engine_.mark(device, reinterpret_cast<gpu::Stream>(stream));
    return mark;
  }

 private:
  Engine& engine_;
  std::map<std::pair<int, std::uintptr_t>, std::shared_ptr<gpu::Mark>> marks_;
};

std::shared_ptr<Handle> start(Engine& engine, const std::shared_ptr<Operation>& operation,
                              std::uintptr_t source, std::uintptr_t target, py::object keep,
                              bool now, int device, std::uintptr_t stream) {
  TensorMemory memory = memory_of(source, target, std::move(keep));
  memory.ready = Marks(engine).mark(device, stream);
  if (!now) return engine.start(operation, std::move(memory));
  std::shared_ptr<Handle> handle;
  {
    const py::gil_scoped_release no_gil;
    handle = engine.start(operation, std::move(memory), {/*waits=*/true, &handler_raised});
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return handle;
}

using Start = std::tuple<std::shared_ptr<Operation>, std::uintptr_t, std::uintptr_t, py::object,
                         int, std::uintptr_t>;

std::vector<std::shared_ptr<Handle>> start_all(Engine& engine, const std::vector<Start>& given) {
  std::vector<std::pair<OperationPtr, TensorMemory>> operations;
  operations.reserve(given.size());
  Marks marks(engine);
  for (const auto& [operation, source, target, keep, device, stream] : given) {
    operations.emplace_back(operation, memory_of(source, target, keep));
    operations.back().second.ready = marks.mark(device, stream);
  }
  return engine.start_all(std::move(operations));
}

void bind_handle(py::module_& m) {
  py::class_<Handle, std::shared_ptr<Handle>>(m, "Handle")
      .def("done", &Handle::done)
      .def("lost", &Handle::lost)
      .def("wait", &wait_for, "Wait until the operation is complete; raise its error if it failed.")
      .def("add_done_callback", &add_done_callback, py::arg("callback"),
           "Call back once: from the engine's thread, or immediately if done already.")
      .def("output", &output, "The result's bytes, 64-byte aligned, owned by the array.")
      .def("copy_output", &copy_output, py::arg("address"), py::arg("stream"),
           py::call_guard<py::gil_scoped_release>(),
           "Copy the result's bytes to the tensor's device, in stream order; wait for the copy.")
      .def("shape", [](const Handle& handle) { return handle.result()->shape; })
      .def("sizes", [](const Handle& handle) { return handle.result()->sizes; })
      .def("result", [](const Handle& handle) { return handle.result()->value; });
}

void bind_frameworks(py::module_& m) {
  m.def(
      "address_of",
      [](const py::array& array) { return reinterpret_cast<std::uintptr_t>(array.data()); },
      py::arg("array"), "The address of a numpy array, in a tenth of the time of ctypes.data.");
  m.def(
      "set_current_engine",
      [](const EnginePtr& engine) { set_current_engine(std::weak_ptr<Engine>(engine)); },
      py::arg("engine").none(true), "Set the engine for operations of frameworks; None for none.");
  m.def("set_calls_block", &set_calls_block, py::arg("block"));
  m.def("foreign_table_address", [] { return reinterpret_cast<std::uintptr_t>(&foreign_table()); });
  m.def(
      "xla_collective", [] { return py::capsule(reinterpret_cast<void*>(&xla::collective)); },
      "Return the handler of all collectives, for jax.ffi.register_ffi_target.");
  m.def(
      "xla_device_collective",
      [](bool streams) {
        auto* const handler = streams ? &xla::device_collective : &xla::twin_collective;
        return py::capsule(reinterpret_cast<void*>(handler));
      },
      py::arg("streams"),
      "Return the handler for buffers in device memory; streams: the runtime passes the stream.");
}

void bind_descriptions(py::module_& m) {
  using py::arg;
  py::class_<Coding>(m, "Coding")
      .def(py::init([](const CodecSpec& spec, bool auto_bits, bool auto_code, bool error_feedback,
                       double nmse_budget) {
             const Choice choice = auto_code   ? Choice::kCode
                                   : auto_bits ? Choice::kBits
                                               : Choice::kNothing;
             return Coding{spec, choice, error_feedback, nmse_budget};
           }),
           arg("spec"), py::kw_only(), arg("auto_bits") = false, arg("auto_code") = false,
           arg("error_feedback") = false, arg("nmse_budget") = 0.0)
      .def_readonly("spec", &Coding::spec)
      .def_property_readonly("auto_bits",
                             [](const Coding& c) { return c.choice != Choice::kNothing; })
      .def_property_readonly("auto_code", [](const Coding& c) { return c.choice == Choice::kCode; })
      .def_readonly("error_feedback", &Coding::error_feedback)
      .def_readonly("nmse_budget", &Coding::nmse_budget)
      .def(py::self == py::self);
  py::class_<Group>(m, "Group")
      .def(py::init([](const std::string& name, uint32_t size) { return Group{name, size}; }),
           arg("name"), arg("size"))
      .def_readonly("name", &Group::name)
      .def_readonly("size", &Group::size)
      .def(py::self == py::self);
  py::class_<Operation, std::shared_ptr<Operation>>(m, "Operation")
      .def(py::init(
          [](const py::kwargs& values) { return std::make_shared<Operation>(with({}, values)); }))
      .def(
          "replaced",
          [](const Operation& operation, const py::kwargs& values) {
            return std::make_shared<Operation>(with(operation, values));
          },
          "The operation with other values of some fields.")
      .def("text", [](const Operation& operation) { return py::bytes(as_text(operation)); })
      .def_static(
          "of_text",
          [](const std::string& text) {
            return std::make_shared<Operation>(of_text(text.data(), text.size()));
          },
          arg("text"), "The inverse of text().")
      .def("__getattr__", &value_of)
      .def("__repr__", &repr)
      .def(py::self == py::self);
}

}  // namespace
}  // namespace qsgd

void bind_operation(py::module_& m) {
  qsgd::bind_descriptions(m);
  qsgd::bind_handle(m);
  qsgd::bind_frameworks(m);
}

void bind_start(qsgd::EngineClass& engine) {
  using py::arg;
  engine.def("start", &qsgd::start, arg("operation"), arg("source") = 0, arg("target") = 0,
             arg("keep") = py::none(), arg("now") = false, arg("device") = -1, arg("stream") = 0);
  engine.def("start_all", &qsgd::start_all, arg("operations"));
}
