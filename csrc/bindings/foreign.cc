// What Python tells the operations that frameworks start by themselves; see foreign/foreign.h.
#include "foreign/foreign.h"

#include <pybind11/stl.h>

#include "bindings/engine.h"

namespace py = pybind11;

namespace qsgd {
namespace {

constexpr OpKind kKinds[] = {OpKind::kAllreduce, OpKind::kBroadcast,     OpKind::kAllgather,
                             OpKind::kAlltoall,  OpKind::kReducescatter, OpKind::kJoin};

OpKind parse_kind(const std::string& name) {
  for (const OpKind kind : kKinds) {
    if (name == describe(kind)) return kind;
  }
  throw usage_error("'" + name + "' is no operation that a framework can start");
}

const char* describe_op(ReduceOp op) {
  static constexpr const char* kNames[] = {"sum", "average", "min", "max", "product", "adasum"};
  return kNames[static_cast<size_t>(op)];
}

py::bytes operation_facts(const std::string& kind, const std::string& name, const std::string& op,
                          double prescale, double postscale, const Coding& coding, bool auto_bits,
                          bool error_feedback, double nmse_budget, bool lasting, bool check_finite,
                          int32_t process_set, const std::string& group, uint32_t group_size,
                          int32_t root) {
  Submission s;
  s.kind = parse_kind(kind);
  s.name = name;
  s.args = {DType::kUint8, parse_op(op), prescale, postscale};
  s.coding = coding;
  s.auto_bits = auto_bits;
  s.error_feedback = error_feedback;
  s.nmse_budget = nmse_budget;
  s.lasting = lasting;
  s.check_finite = check_finite;
  s.set = process_set;
  s.group = group;
  s.group_size = group_size;
  s.root = root;
  return write_facts(s);
}

py::dict read_operation_facts(const std::string& facts) {
  const Submission s = read_facts(facts.data(), facts.size());
  py::dict d;
  d["kind"] = describe(s.kind);
  d["name"] = s.name;
  d["op"] = describe_op(s.args.op);
  d["prescale"] = s.args.prescale;
  d["postscale"] = s.args.postscale;
  d["coding"] = s.coding;
  d["auto_bits"] = s.auto_bits;
  d["error_feedback"] = s.error_feedback;
  d["nmse_budget"] = s.nmse_budget;
  d["lasting"] = s.lasting;
  d["check_finite"] = s.check_finite;
  d["process_set"] = s.set;
  d["group"] = s.group;
  d["group_size"] = s.group_size;
  d["root"] = s.root;
  return d;
}

}  // namespace
}  // namespace qsgd

void bind_foreign(py::module_& m) {
  using namespace qsgd;
  using py::arg;
  m.def(
      "set_current_engine",
      [](const EnginePtr& engine) { set_current_engine(std::weak_ptr<Engine>(engine)); },
      arg("engine").none(true), "Say which engine operations of frameworks go to; None for none.");
  m.def("operation_facts", &operation_facts, py::kw_only(), arg("kind"), arg("name") = "",
        arg("op") = "sum", arg("prescale") = 1.0, arg("postscale") = 1.0,
        arg("coding") = py::none(), arg("auto_bits") = false, arg("error_feedback") = false,
        arg("nmse_budget") = 0.0, arg("lasting") = true, arg("check_finite") = false,
        arg("process_set") = 0, arg("group") = "", arg("group_size") = 0, arg("root") = 0,
        "Return an operation's facts, but for shape and type, as a framework's graph keeps them.");
  m.def("read_operation_facts", &read_operation_facts, arg("facts"),
        "Return what operation_facts() was given.");
  m.def("foreign_table_address", [] { return reinterpret_cast<std::uintptr_t>(&foreign_table()); });
}
