#include "engine/engine.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "transport/mpi_transport.h"
#include "transport/thread_transport.h"

namespace py = pybind11;

namespace qsgd {
namespace {

constexpr std::chrono::milliseconds kSignalCheck{100};

NonFinite parse_nonfinite(const std::string& name) {
  if (name == "error") return NonFinite::kError;
  if (name == "warn") return NonFinite::kWarn;
  if (name == "propagate") return NonFinite::kPropagate;
  throw usage_error("unknown policy '" + name + "'; known are error, warn, propagate");
}

// The engine calls the logger from its own thread, where the GIL is not held.
std::function<void(const std::string&)> with_gil(py::object log) {
  if (log.is_none()) return nullptr;
  const auto shared = std::shared_ptr<py::object>(new py::object(std::move(log)), [](auto* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  });
  return [shared](const std::string& text) {
    const py::gil_scoped_acquire gil;
    try {
      (*shared)(text);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("qsgd_hpc log callback");
    }
  };
}

EngineConfig make_config(uint64_t seed, size_t fusion_bytes, const std::string& nonfinite,
                         double stall_warning_s, py::object log) {
  return {seed, fusion_bytes, parse_nonfinite(nonfinite), stall_warning_s,
          with_gil(std::move(log))};
}

// The engine's thread may wait for the GIL to log while its destructor waits for the thread.
struct DeleteWithoutGil {
  void operator()(Engine* engine) const {
    const py::gil_scoped_release no_gil;
    delete engine;
  }
};
using EnginePtr = std::unique_ptr<Engine, DeleteWithoutGil>;

EnginePtr over_mpi(const MpiFacts& facts, EngineConfig config) {
  auto abort = std::make_shared<AbortFlag>();
  auto transport = make_mpi_transport(facts, abort);
  return EnginePtr(new Engine(std::move(transport), std::move(abort), std::move(config)));
}

EnginePtr over_threads(const std::shared_ptr<ThreadWorld>& world, int rank, EngineConfig config) {
  return EnginePtr(new Engine(std::make_unique<ThreadTransport>(world, rank), world->abort_flag(),
                              std::move(config)));
}

std::shared_ptr<Handle> allreduce(Engine& engine, const std::string& name, std::uintptr_t in,
                                  std::uintptr_t out, const std::vector<int64_t>& shape,
                                  const std::string& dtype, const std::string& op, double prescale,
                                  double postscale, const Coding& coding, bool check_finite) {
  Submission s;
  s.name = name;
  s.kind = OpKind::kAllreduce;
  s.shape = shape;
  s.args = {parse_dtype(dtype), parse_op(op), prescale, postscale};
  s.quantised = coding.has_value();
  if (s.quantised) s.spec = parse_spec(coding);
  s.check_finite = check_finite;
  return engine.submit(std::move(s), reinterpret_cast<const void*>(in),
                       reinterpret_cast<void*>(out));
}

std::shared_ptr<Handle> broadcast_tensor(Engine& engine, const std::string& name,
                                         std::uintptr_t data, const std::vector<int64_t>& shape,
                                         const std::string& dtype, int root) {
  Submission s;
  s.name = name;
  s.kind = OpKind::kBroadcast;
  s.shape = shape;
  s.args.dtype = parse_dtype(dtype);
  s.root = root;
  void* const pointer = reinterpret_cast<void*>(data);
  return engine.submit(std::move(s), pointer, pointer);
}

// Waits without the GIL, but wakes to let Ctrl-C through.
void wait(const Handle& handle) {
  while (true) {
    {
      const py::gil_scoped_release no_gil;
      if (handle.wait_for(kSignalCheck)) break;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  handle.check();
}

py::dict stats(const Engine& engine) {
  const EngineStats s = engine.stats();
  py::dict d;
  d["wire_bytes"] = s.wire_bytes;
  d["gradient_bytes"] = s.gradient_bytes;
  d["allreduces"] = s.allreduces;
  d["fused_reductions"] = s.fused;
  d["comm_time_s"] = s.comm_time_s;
  return d;
}

}  // namespace
}  // namespace qsgd

void bind_engine(py::module_& m) {
  using namespace qsgd;
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<MpiFacts>(m, "MpiFacts")
      .def(py::init([](std::string module_path, std::string library, bool pointer_handles,
                       std::uintptr_t comm, std::uintptr_t byte_type, int rank, int size) {
             return MpiFacts{std::move(module_path),
                             std::move(library),
                             pointer_handles,
                             comm,
                             byte_type,
                             rank,
                             size};
           }),
           py::kw_only(), py::arg("module_path"), py::arg("library"), py::arg("pointer_handles"),
           py::arg("comm"), py::arg("byte_type"), py::arg("rank"), py::arg("size"));

  py::class_<EngineConfig>(m, "EngineConfig")
      .def(py::init(&make_config), py::kw_only(), py::arg("seed") = 0,
           py::arg("fusion_bytes") = size_t{64} << 20, py::arg("nonfinite") = "error",
           py::arg("stall_warning_s") = 60.0, py::arg("log") = py::none());

  py::class_<ThreadWorld, std::shared_ptr<ThreadWorld>>(m, "ThreadWorld")
      .def(py::init<int>(), py::arg("size"));

  py::class_<Handle, std::shared_ptr<Handle>>(m, "Handle")
      .def("done", &Handle::done)
      .def("lost", &Handle::lost)
      .def("wait", &wait, "Wait until the operation is complete; raise what it ended with.");

  py::class_<Engine, EnginePtr>(m, "Engine")
      .def_static("over_mpi", &over_mpi, py::arg("facts"), py::arg("config"))
      .def_static("over_threads", &over_threads, py::arg("world"), py::arg("rank"),
                  py::arg("config"))
      .def("allreduce", &allreduce, py::kw_only(), py::arg("name"), py::arg("source"),
           py::arg("target"), py::arg("shape"), py::arg("dtype"), py::arg("op"),
           py::arg("prescale"), py::arg("postscale"), py::arg("coding"), py::arg("check_finite"))
      .def("broadcast", &broadcast_tensor, py::kw_only(), py::arg("name"), py::arg("target"),
           py::arg("shape"), py::arg("dtype"), py::arg("root"))
      .def(
          "watch",
          [](Engine& engine, const std::vector<std::tuple<int, int, std::string>>& peers,
             double grace_s) {
            std::vector<Lifeline::Peer> list;
            for (const auto& [fd, rank, label] : peers) list.push_back({fd, rank, label});
            engine.watch(std::move(list), grace_s);
          },
          py::arg("peers"), py::arg("grace_s"), NoGil())
      .def("shutdown", &Engine::shutdown, py::arg("reason"), py::arg("patience_s") = 1e9, NoGil())
      .def("abort", &Engine::abort, py::arg("message"), NoGil())
      .def("aborted", &Engine::aborted)
      .def("stats", &stats)
      .def_property_readonly("rank", &Engine::rank)
      .def_property_readonly("size", &Engine::size);
}
