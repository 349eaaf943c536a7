// Engine.allreduce() and its like: what Python passes, as a submission.
#include <pybind11/stl.h>

#include "bindings/engine.h"

namespace py = pybind11;

namespace qsgd {
namespace {

using HandlePtr = std::shared_ptr<Handle>;
using Shape = std::vector<int64_t>;

// Which operations are carried out together; "" for one by itself.
struct Group {
  std::string name;
  uint32_t size;
};

Submission describe(OpKind kind, const std::string& name, const Shape& shape,
                    const std::string& dtype, int32_t set, const Group& group = {}) {
  Submission s;
  s.set = set;
  s.group = group.name;
  s.group_size = group.size;
  s.kind = kind;
  s.name = name;
  s.shape = shape;
  s.args.dtype = parse_dtype(dtype);
  return s;
}

// False while no signal has come, or its handler raised nothing.
bool handler_raised() {
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// `now`: the caller does nothing but wait for it.
HandlePtr submit(Engine& engine, Submission submission, std::uintptr_t in, std::uintptr_t out,
                 py::object keep, bool now = false) {
  const void* const source = reinterpret_cast<const void*>(in);
  void* const target = reinterpret_cast<void*>(out);
  std::shared_ptr<void> held = hold(std::move(keep));
  if (!now) return engine.submit(std::move(submission), source, target, std::move(held));
  HandlePtr handle;
  {
    const py::gil_scoped_release no_gil;
    handle =
        engine.perform(std::move(submission), source, target, std::move(held), &handler_raised);
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return handle;
}

Submission describe_allreduce(const std::string& name, const Shape& shape, const std::string& dtype,
                              const std::string& op, double prescale, double postscale,
                              const Coding& coding, bool auto_bits, bool error_feedback,
                              double nmse_budget, bool lasting, bool check_finite,
                              int32_t process_set, const std::string& group, uint32_t group_size) {
  Submission s = describe(OpKind::kAllreduce, name, shape, dtype, process_set, {group, group_size});
  s.args = {s.args.dtype, parse_op(op), prescale, postscale};
  s.coding = coding;
  s.auto_bits = auto_bits;
  s.error_feedback = error_feedback;
  s.nmse_budget = nmse_budget;
  s.lasting = lasting;
  s.check_finite = check_finite;
  return s;
}

HandlePtr submit_allreduce(Engine& engine, const std::string& name, std::uintptr_t source,
                           std::uintptr_t target, const Shape& shape, const std::string& dtype,
                           const std::string& op, double prescale, double postscale,
                           const Coding& coding, bool auto_bits, bool error_feedback,
                           double nmse_budget, bool lasting, bool check_finite, int32_t process_set,
                           const std::string& group, uint32_t group_size, py::object keep,
                           bool now) {
  return submit(engine,
                describe_allreduce(name, shape, dtype, op, prescale, postscale, coding, auto_bits,
                                   error_feedback, nmse_budget, lasting, check_finite, process_set,
                                   group, group_size),
                source, target, std::move(keep), now);
}

// An allreduce of a tensor that comes again in every step: its facts cross from Python once.
class PreparedAllreduce {
 public:
  PreparedAllreduce(Engine& engine, Submission submission)
      : engine_(engine), submission_(std::move(submission)) {}

  HandlePtr start(std::uintptr_t source, std::uintptr_t target, py::object keep, bool now) const {
    return submit(engine_, submission_, source, target, std::move(keep), now);
  }

  // For a caller that only waits for it: no handle crosses to Python and back.
  void run(std::uintptr_t source, std::uintptr_t target, py::object keep) const {
    HandlePtr handle;
    try {
      {
        const py::gil_scoped_release no_gil;
        handle = engine_.perform(submission_, reinterpret_cast<const void*>(source),
                                 reinterpret_cast<void*>(target), nullptr, &handler_raised);
      }
      if (PyErr_Occurred() != nullptr) throw py::error_already_set();
      wait_for(*handle);
    } catch (...) {
      // MPI may still write to its memory, for ever.
      if (handle && (!handle->done() || handle->lost())) keep.release();
      throw;
    }
  }

 private:
  Engine& engine_;
  const Submission submission_;
};

PreparedAllreduce prepare_allreduce(Engine& engine, const std::string& name, const Shape& shape,
                                    const std::string& dtype, const std::string& op,
                                    double prescale, double postscale, const Coding& coding,
                                    bool auto_bits, bool error_feedback, double nmse_budget,
                                    bool lasting, bool check_finite, int32_t process_set,
                                    const std::string& group, uint32_t group_size) {
  return {engine, describe_allreduce(name, shape, dtype, op, prescale, postscale, coding, auto_bits,
                                     error_feedback, nmse_budget, lasting, check_finite,
                                     process_set, group, group_size)};
}

HandlePtr submit_broadcast(Engine& engine, const std::string& name, std::uintptr_t target,
                           const Shape& shape, const std::string& dtype, int root,
                           int32_t process_set, py::object keep, bool now) {
  Submission s = describe(OpKind::kBroadcast, name, shape, dtype, process_set);
  s.root = root;
  return submit(engine, std::move(s), target, target, std::move(keep), now);
}

HandlePtr submit_allgather(Engine& engine, const std::string& name, std::uintptr_t source,
                           const Shape& shape, const std::string& dtype, int32_t process_set,
                           const std::string& group, uint32_t group_size, py::object keep,
                           bool now) {
  return submit(engine,
                describe(OpKind::kAllgather, name, shape, dtype, process_set, {group, group_size}),
                source, 0, std::move(keep), now);
}

HandlePtr submit_alltoall(Engine& engine, const std::string& name, std::uintptr_t source,
                          const Shape& shape, const std::string& dtype, const Shape& splits,
                          int32_t process_set, py::object keep, bool now) {
  Submission s = describe(OpKind::kAlltoall, name, shape, dtype, process_set);
  s.splits = splits;
  return submit(engine, std::move(s), source, 0, std::move(keep), now);
}

HandlePtr submit_reducescatter(Engine& engine, const std::string& name, std::uintptr_t source,
                               const Shape& shape, const std::string& dtype, const std::string& op,
                               double prescale, double postscale, int32_t process_set,
                               const std::string& group, uint32_t group_size, py::object keep,
                               bool now) {
  Submission s =
      describe(OpKind::kReducescatter, name, shape, dtype, process_set, {group, group_size});
  s.args = {s.args.dtype, parse_op(op), prescale, postscale};
  return submit(engine, std::move(s), source, 0, std::move(keep), now);
}

HandlePtr submit_barrier(Engine& engine, const std::string& name, int32_t process_set) {
  return submit(engine, describe(OpKind::kBarrier, name, {0}, "uint8", process_set), 0, 0,
                py::none(), /*now=*/true);
}

// What has no name of the caller's: the ranks call it in one order.
HandlePtr submit_for_all(Engine& engine, OpKind kind, const Shape& ranks = {}) {
  Submission s = describe(kind, engine.next_name(kind), {0}, "uint8", 0);
  s.ranks = ranks;
  return submit(engine, std::move(s), 0, 0, py::none());
}

}  // namespace
}  // namespace qsgd

void bind_operations(qsgd::EngineClass& engine) {
  using namespace qsgd;
  using py::arg;
  py::class_<PreparedAllreduce>(engine, "PreparedAllreduce")
      .def("start", &PreparedAllreduce::start, arg("source"), arg("target"), arg("keep"),
           arg("now") = false)
      .def("run", &PreparedAllreduce::run, arg("source"), arg("target"), arg("keep"),
           "The same as start() with now=True, and wait().");
  engine
      .def("allreduce", &submit_allreduce, py::kw_only(), arg("name"), arg("source"), arg("target"),
           arg("shape"), arg("dtype"), arg("op"), arg("prescale"), arg("postscale"), arg("coding"),
           arg("auto_bits") = false, arg("error_feedback") = false, arg("nmse_budget") = 0.0,
           arg("lasting") = true, arg("check_finite"), arg("process_set") = 0, arg("group") = "",
           arg("group_size") = 0, arg("keep") = py::none(), arg("now") = false)
      .def("prepare_allreduce", &prepare_allreduce, py::kw_only(), arg("name"), arg("shape"),
           arg("dtype"), arg("op"), arg("prescale"), arg("postscale"), arg("coding"),
           arg("auto_bits") = false, arg("error_feedback") = false, arg("nmse_budget") = 0.0,
           arg("lasting") = true, arg("check_finite"), arg("process_set") = 0, arg("group") = "",
           arg("group_size") = 0, py::keep_alive<0, 1>())
      .def("broadcast", &submit_broadcast, py::kw_only(), arg("name"), arg("target"), arg("shape"),
           arg("dtype"), arg("root"), arg("process_set") = 0, arg("keep") = py::none(),
           arg("now") = false)
      .def("allgather", &submit_allgather, py::kw_only(), arg("name"), arg("source"), arg("shape"),
           arg("dtype"), arg("process_set") = 0, arg("group") = "", arg("group_size") = 0,
           arg("keep") = py::none(), arg("now") = false)
      .def("alltoall", &submit_alltoall, py::kw_only(), arg("name"), arg("source"), arg("shape"),
           arg("dtype"), arg("splits"), arg("process_set") = 0, arg("keep") = py::none(),
           arg("now") = false)
      .def("reducescatter", &submit_reducescatter, py::kw_only(), arg("name"), arg("source"),
           arg("shape"), arg("dtype"), arg("op"), arg("prescale"), arg("postscale"),
           arg("process_set") = 0, arg("group") = "", arg("group_size") = 0,
           arg("keep") = py::none(), arg("now") = false)
      .def("barrier", &submit_barrier, py::kw_only(), arg("name"), arg("process_set") = 0)
      .def(
          "join", [](Engine& e) { return submit_for_all(e, OpKind::kJoin); },
          "Take part with zeros until every rank has joined; the result is the last to do so.")
      .def(
          "add_process_set",
          [](Engine& e, const Shape& ranks) { return submit_for_all(e, OpKind::kAddSet, ranks); },
          arg("ranks"), "Make a process set, on all ranks together; the result is its number.")
      .def(
          "remove_process_set",
          [](Engine& e, int64_t id) { return submit_for_all(e, OpKind::kRemoveSet, {id}); },
          arg("id"), "Remove a process set, on all ranks together.");
}
