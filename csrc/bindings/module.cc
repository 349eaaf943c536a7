// qsgd_hpc._core: the Python interface of the core.
#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "common/error.h"
#include "engine/roll_call.h"
#include "engine/tree.h"

namespace py = pybind11;

namespace {

#if defined(__clang__)
constexpr char kCompiler[] = "Clang " __clang_version__;
#else
constexpr char kCompiler[] = "GCC " __VERSION__;
#endif

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

void bind_tree(py::module_& m) {
  using qsgd::Tree;
  py::class_<Tree>(m, "Tree")
      .def(py::init(
               [](int rank, int size, const std::optional<std::vector<std::vector<int>>>& nodes,
                  int fan_out) { return Tree(rank, size, nodes ? &*nodes : nullptr, fan_out); }),
           py::arg("rank"), py::arg("size"), py::arg("nodes") = py::none(), py::arg("fan_out") = 0)
      .def_property_readonly("parent", &Tree::parent, "Parent in the tree; -1 for rank 0.")
      .def_property_readonly("children", &Tree::children)
      .def("below", [](const Tree& tree, size_t child) { return tree.below(child).list(); });
}

void bind_roll_call(py::module_& m) {
  using qsgd::RollCall;
  py::class_<RollCall>(m, "RollCall")
      .def(py::init([](std::string launch, std::string host, int rank, int ranks, int local_rank,
                       int local_size, double warning_s, double shutdown_s) {
             return std::make_unique<RollCall>(
                 RollCall::RankPlace{std::move(launch), std::move(host), rank, ranks, local_rank,
                                     local_size},
                 warning_s, shutdown_s);
           }),
           py::kw_only(), py::arg("launch"), py::arg("host"), py::arg("rank"), py::arg("ranks"),
           py::arg("local_rank"), py::arg("local_size"), py::arg("warning_s"),
           py::arg("shutdown_s"))
      .def("end", &RollCall::end, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The compiled core of qsgd-hpc: codec, collectives, engine.";
  m.attr("COMPILER") = kCompiler;
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
  bind_roll_call(m);
  bind_tree(m);
}
