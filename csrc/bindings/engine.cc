#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "transport/mpi_transport.h"
#include "transport/thread_transport.h"

namespace py = pybind11;

namespace qsgd {
namespace {

NonFinite parse_nonfinite(const std::string& name) {
  return look_up<NonFinite, 3>("policy", name,
                               {{{"error", NonFinite::kError},
                                 {"warn", NonFinite::kWarn},
                                 {"propagate", NonFinite::kPropagate}}});
}

Planning parse_planning(const std::string& name) {
  return look_up<Planning, 3>(
      "planner", name,
      {{{"off", Planning::kOff}, {"advise", Planning::kAdvise}, {"on", Planning::kChoose}}});
}

// The engine calls back from its own thread, which does not hold the GIL.
template <class Argument>
std::function<void(Argument)> with_gil(py::object callback) {
  const std::shared_ptr<py::object> held = hold(std::move(callback));
  if (held == nullptr) return nullptr;
  return [held](Argument argument) {
    const py::gil_scoped_acquire gil;
    try {
      (*held)(argument);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("qsgd_hpc engine callback");
    }
  };
}

EngineConfig make_config(uint64_t seed, size_t fusion_bytes, const std::string& nonfinite,
                         const std::string& algorithm, int threads, const std::string& planner,
                         size_t segment_elements, std::optional<Machine> machine,
                         bool measure_at_start, size_t cache_capacity, double cycle_time_s,
                         double stall_warning_s, double stall_shutdown_s, double deadlock_s,
                         int fan_out, size_t kept_steps, std::string gpu_library,
                         std::string nccl_library, py::object log, py::object measured) {
  EngineConfig config;
  const auto warn = with_gil<const std::string&>(std::move(log));
  config.reducing = {seed, parse_nonfinite(nonfinite), warn, std::move(nccl_library)};
  config.agreement.tuning = {fusion_bytes, cycle_time_s, parse_algorithm(algorithm), std::nullopt,
                             SegmentSize(segment_elements)};
  config.agreement.planning = parse_planning(planner);
  config.agreement.cache_capacity = cache_capacity;
  config.agreement.stall_warning_s = stall_warning_s;
  config.agreement.stall_shutdown_s = stall_shutdown_s;
  config.agreement.deadlock_s = deadlock_s;
  config.agreement.fan_out = fan_out;
  config.agreement.log = warn;
  config.threads = threads;
  config.machine = std::move(machine);
  config.measure_at_start = measure_at_start;
  config.kept_steps = kept_steps;
  config.gpu_library = std::move(gpu_library);
  config.measured = with_gil<const Machine&>(std::move(measured));
  return config;
}

EnginePtr engine_over_mpi(const MpiFacts& facts, EngineConfig config,
                          const std::optional<NodeFacts>& node) {
  auto transport = make_mpi_transport(facts);
  auto shared = node ? std::make_unique<SharedNode>(*node, *transport) : nullptr;
  return EnginePtr(new Engine(std::move(transport), std::move(config), std::move(shared)),
                   DeleteWhereMade<Engine>());
}

EnginePtr engine_over_threads(const std::shared_ptr<ThreadWorld>& world, int rank,
                              EngineConfig config, const std::optional<int>& ranks_per_node) {
  auto transport = std::make_unique<ThreadTransport>(world, rank);
  auto shared = ranks_per_node ? make_thread_node(*world, *transport, *ranks_per_node) : nullptr;
  return EnginePtr(new Engine(std::move(transport), std::move(config), std::move(shared)),
                   DeleteWhereMade<Engine>());
}

void tune(Engine& engine, std::optional<size_t> fusion_bytes, std::optional<double> cycle_time_s,
          const std::optional<std::string>& algorithm, std::optional<int> bits,
          std::optional<size_t> segment_elements) {
  Tuning tuning{fusion_bytes, cycle_time_s, std::nullopt, bits, std::nullopt};
  if (segment_elements) tuning.segment = SegmentSize(*segment_elements);
  if (algorithm) tuning.algorithm = parse_algorithm(*algorithm);
  engine.tune(tuning);
}

py::dict stats(const Engine& engine) {
  const EngineStats s = engine.stats();
  py::dict d;
  d["wire_bytes"] = s.wire_bytes;
  d["shared_memory_bytes"] = s.shared_memory_bytes;
  d["control_bytes"] = s.control_bytes;
  d["mailed_bytes"] = s.mailed_bytes;
  d["messages_heard"] = s.messages_heard;
  d["gradient_bytes"] = s.work.gradient_bytes;
  d["allreduces"] = s.work.allreduces;
  d["fused_reductions"] = s.work.fused;
  d["comm_time_s"] = s.work.comm_time_s;
  d["coding_time_s"] = s.work.coding_time_s;
  d["wait_time_s"] = s.wait_time_s;
  d["steps"] = s.steps;
  return d;
}

template <class T, class Get>
py::array_t<T> column(const std::vector<Step>& steps, const Get& get) {
  py::array_t<T> array(static_cast<py::ssize_t>(steps.size()));
  std::transform(steps.begin(), steps.end(), array.mutable_data(), get);
  return array;
}

py::dict step_profile(const Engine& engine) {
  const StepProfile profile = engine.step_profile();
  const std::vector<Step>& last = profile.last;
  py::dict d;
  d["steps"] = profile.steps;
  d["step_s"] = column<double>(last, [](const Step& s) { return s.seconds; });
  d["wait_s"] = column<double>(last, [](const Step& s) { return s.work.wait_s; });
  d["comm_s"] = column<double>(last, [](const Step& s) { return s.work.comm_s; });
  d["coding_s"] = column<double>(last, [](const Step& s) { return s.work.coding_s; });
  d["wire_bytes"] = column<uint64_t>(last, [](const Step& s) { return s.work.wire_bytes; });
  py::list layers;
  for (const StepLayer& layer : profile.layers) {
    layers.append(py::make_tuple(layer.name, layer.elements, layer.ready_s));
  }
  d["layers"] = layers;
  d["waits_seen"] = profile.waits_seen;
  return d;
}

py::dict quality(const Engine& engine) {
  py::dict all;
  for (const auto& [name, q] : engine.quality()) {
    py::dict d;
    d["coding"] = q.coding ? describe(*q.coding) : "none";
    d["bits"] = q.code_bits;
    d["nmse"] = q.nmse;
    d["mean_nmse"] = q.nmse_sum / static_cast<double>(q.reductions);
    d["wire_bytes"] = q.wire_bytes;
    d["elements"] = q.count;
    d["reductions"] = q.reductions;
    all[py::str(name)] = d;
  }
  return all;
}

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

Floats owed_share(Engine& engine, const std::string& name, int32_t set) {
  const std::vector<float> share = engine.owed_share(name, set);
  return Floats(static_cast<py::ssize_t>(share.size()), share.data());
}

void restore_owed(Engine& engine, const std::map<std::string, Floats>& owed, int32_t set) {
  std::map<std::string, std::vector<float>> copies;
  for (const auto& [name, values] : owed) {
    copies[name].assign(values.data(), values.data() + values.size());
  }
  engine.restore_owed(std::move(copies), set);
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
           py::arg("algorithm") = "auto", py::arg("threads") = 1, py::arg("planner") = "off",
           py::arg("segment_elements") = 0, py::arg("machine") = py::none(),
           py::arg("measure_at_start") = false, py::arg("cache_capacity") = 1024,
           py::arg("cycle_time_s") = 0.0, py::arg("stall_warning_s") = 60.0,
           py::arg("stall_shutdown_s") = 0.0, py::arg("deadlock_s") = 10.0, py::arg("fan_out") = 0,
           py::arg("kept_steps") = size_t{65536}, py::arg("gpu_library") = "",
           py::arg("nccl_library") = "", py::arg("log") = py::none(),
           py::arg("measured") = py::none());

  py::class_<ThreadWorld, std::shared_ptr<ThreadWorld>>(m, "ThreadWorld")
      .def(py::init<int>(), py::arg("size"))
      .def_property_readonly("most_waiting", &ThreadWorld::most_waiting,
                             "Maximum number of messages of a stream that waited for a receive.");

  EngineClass engine(m, "Engine");
  bind_start(engine);
  engine
      .def_static("over_mpi", &engine_over_mpi, py::arg("facts"), py::arg("config"),
                  py::arg("node") = py::none())
      .def_static("over_threads", &engine_over_threads, py::arg("world"), py::arg("rank"),
                  py::arg("config"), py::arg("ranks_per_node") = py::none())
      .def(
          "watch",
          [](Engine& engine, const Peers& peers, double grace_s) {
            engine.watch(peers_of(peers), grace_s);
          },
          py::arg("peers"), py::arg("grace_s"), NoGil())
      .def(
          "start_timeline",
          [](Engine& engine, const std::string& path, bool mark_cycles,
             std::optional<double> zero_s) {
            using Clock = Timeline::Clock;
            const std::chrono::duration<double> since_boot(zero_s.value_or(0));
            engine.start_timeline(
                path, mark_cycles,
                zero_s ? Clock::time_point(std::chrono::duration_cast<Clock::duration>(since_boot))
                       : Clock::now());
          },
          py::arg("path"), py::arg("mark_cycles") = false, py::arg("zero_s") = py::none(),
          "Record every operation; times are relative to zero_s of time.monotonic(), or now.")
      .def("stop_timeline", &Engine::stop_timeline, NoGil())
      .def("shutdown", &Engine::shutdown, py::arg("reason"), py::arg("patience_s") = 1e9, NoGil())
      .def("abort", &Engine::abort, py::arg("message"), NoGil())
      .def("aborted", &Engine::aborted)
      .def("joins", &Engine::joins)
      .def("tune", &tune, py::kw_only(), py::arg("fusion_bytes") = py::none(),
           py::arg("cycle_time_s") = py::none(), py::arg("algorithm") = py::none(),
           py::arg("bits") = py::none(), py::arg("segment_elements") = py::none(),
           "On rank 0: change how later operations are executed, on all ranks alike.")
      .def("machine", &Engine::machine, NoGil(),
           "The planner's measurements, or None; blocks if they are made at the start.")
      .def("stats", &stats)
      .def("step_profile", &step_profile, "This rank's work in each of the latest completed steps.")
      .def("quality", &quality, "Code and coding error of each tensor with compression, by name.")
      .def("owed_counts", &Engine::owed_counts, py::arg("process_set") = 0,
           "Number of elements of each tensor of a process set with a residual.")
      .def("owed_share", &owed_share, py::arg("name"), py::arg("process_set") = 0,
           "This rank's share of a tensor's residual; the shares of all ranks add up to it.")
      .def("restore_owed", &restore_owed, py::arg("owed"), py::arg("process_set") = 0,
           "Replace all residuals of a process set; every rank passes the same sums of shares.")
      .def("forget_owed", &Engine::forget_owed, py::arg("names"),
           "Delete the residuals of tensors that are not reduced again.")
      .def("coded_steps", &Engine::coded_steps,
           "How often each tensor was coded, which determines the noise of its rounding.")
      .def("restore_coded_steps", &Engine::restore_coded_steps, py::arg("steps"),
           "Replace the values of coded_steps(); every rank passes the same.")
      .def_property_readonly("rank", &Engine::rank)
      .def_property_readonly("size", &Engine::size);
}
