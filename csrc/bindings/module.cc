// qsgd_hpc._core: the Python interface of the core. The cost model and the plans; the tree.
#include <pybind11/pybind11.h>

#include <tuple>

#include "bindings/bindings.h"
#include "common/error.h"
#include "engine/roll_call.h"
#include "engine/tree.h"
#include "foreign/foreign.h"
#include "planner/codes.h"
#include "planner/plan.h"

namespace py = pybind11;

namespace qsgd {
namespace {

using Pair = std::pair<double, double>;
using Cost = std::tuple<CodecSpec, double, double, double>;
using Seen = std::tuple<std::string, OptionalSpec, size_t, double>;

Link link_of(const Pair& pair) { return {pair.first, pair.second}; }
Pair pair_of(const Link& link) { return {link.alpha_s, link.beta_s_per_byte}; }

Machine make_machine(int ranks, int ranks_per_node, const std::string& exact,
                     const std::string& coded, const Pair& within, const Pair& across,
                     const Pair& shared, double add_s_per_byte, const std::vector<Cost>& codecs,
                     const std::vector<Seen>& observed) {
  Machine m;
  m.ranks = ranks;
  m.ranks_per_node = ranks_per_node;
  m.exact = parse_algorithm(exact);
  m.coded = parse_algorithm(coded);
  m.within = link_of(within);
  m.across = link_of(across);
  m.shared = link_of(shared);
  m.add_s_per_byte = add_s_per_byte;
  for (const auto& [spec, encode_s, decode_s, decode_add_s] : codecs) {
    m.codecs.push_back({spec, encode_s, decode_s, decode_add_s});
  }
  for (const auto& [algorithm, spec, count, seconds] : observed) {
    m.observed.push_back({parse_algorithm(algorithm), spec, count, seconds});
  }
  check(m);
  return m;
}

std::vector<Cost> costs(const Machine& m) {
  std::vector<Cost> list;
  for (const CodecCost& c : m.codecs) {
    list.emplace_back(c.spec, c.encode_s, c.decode_s, c.decode_add_s);
  }
  return list;
}

std::vector<Seen> observations(const Machine& m) {
  std::vector<Seen> list;
  for (const Observation& o : m.observed) {
    list.emplace_back(name_of(o.algorithm), o.spec, o.count, o.seconds);
  }
  return list;
}

void bind_machine(py::module_& m) {
  py::class_<Machine>(m, "Machine")
      .def(py::init(&make_machine), py::kw_only(), py::arg("ranks"), py::arg("ranks_per_node") = 1,
           py::arg("exact") = "direct", py::arg("coded") = "sra", py::arg("within") = Pair(),
           py::arg("across") = Pair(), py::arg("shared") = Pair(), py::arg("add_s_per_byte") = 0.0,
           py::arg("codecs") = std::vector<Cost>(), py::arg("observed") = std::vector<Seen>())
      .def_readonly("ranks", &Machine::ranks)
      .def_readonly("ranks_per_node", &Machine::ranks_per_node)
      .def_property_readonly("exact", [](const Machine& m) { return name_of(m.exact); })
      .def_property_readonly("coded", [](const Machine& m) { return name_of(m.coded); })
      .def_readonly("add_s_per_byte", &Machine::add_s_per_byte)
      .def_property_readonly("within", [](const Machine& m) { return pair_of(m.within); })
      .def_property_readonly("across", [](const Machine& m) { return pair_of(m.across); })
      .def_property_readonly("shared", [](const Machine& m) { return pair_of(m.shared); })
      .def_property_readonly("link", [](const Machine& m) { return pair_of(m.link()); })
      .def_property_readonly("codecs", &costs)
      .def_property_readonly("observed", &observations)
      .def(
          "known",
          [](const Machine& m, bool compressed) {
            std::vector<std::string> names;
            for (const Algorithm a : m.known(compressed)) names.emplace_back(name_of(a));
            return names;
          },
          py::kw_only(), py::arg("compressed"), "Names of the algorithms that were measured.");
}

void bind_plan(py::module_& m) {
  py::class_<Plan>(m, "Plan")
      .def_property_readonly("algorithm", [](const Plan& p) { return name_of(p.algorithm); })
      .def_readonly("spec", &Plan::spec)
      .def_readonly("seconds", &Plan::seconds)
      .def_readonly("exact_seconds", &Plan::exact_seconds)
      .def_readonly("reason", &Plan::reason);
  m.def(
      "plan",
      [](const Machine& machine, size_t count, const std::vector<CodecSpec>& codecs,
         const std::string& exact, const std::string& coded, bool any_algorithm, double worth) {
        return choose(
            machine, count,
            {codecs, parse_algorithm(exact), parse_algorithm(coded), any_algorithm, worth});
      },
      py::arg("machine"), py::kw_only(), py::arg("count"), py::arg("codecs"),
      py::arg("exact") = "auto", py::arg("coded") = "auto", py::arg("any_algorithm") = false,
      py::arg("worth") = PlanRequest().worth);
  m.def(
      "plan_threshold",
      [](const Machine& machine, const CodecSpec& spec) { return threshold(machine, spec, {}); },
      py::arg("machine"), py::arg("spec"));
}

void bind_codes(py::module_& m) {
  m.def("usual_codes", &usual_codes, "The codes whose allreduces are measured.");
  m.def("rotated_codes", &rotated_codes, "The codes that are only timed.");
  m.def("open_codes", &open_codes, py::arg("spec"), py::kw_only(), py::arg("any_code"),
        "The codes between which a plan chooses if the bits, or the code, are open.");
}

template <class Cost>
void bind_cost(py::module_& m, const char* name, Cost cost) {
  m.def(
      name,
      [cost](const Machine& machine, const std::string& algorithm, size_t count,
             const OptionalSpec& coding) {
        return cost(machine, parse_algorithm(algorithm), count, coding);
      },
      py::arg("machine"), py::kw_only(), py::arg("algorithm"), py::arg("count"),
      py::arg("coding") = py::none());
}

#if defined(__clang__)
constexpr char kCompiler[] = "Clang " __clang_version__;
#else
constexpr char kCompiler[] = "GCC " __VERSION__;
#endif

void bind_tree(py::module_& m) {
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
}  // namespace qsgd

PYBIND11_MODULE(_core, m) {
  m.doc() = "The compiled core of qsgd-hpc: codec, collectives, engine.";
  m.attr("COMPILER") = qsgd::kCompiler;
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const qsgd::Error& error) {
      const py::object type =
          py::module_::import("qsgd_hpc.errors").attr(qsgd::class_of(error.kind()));
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
  qsgd::bind_machine(m);
  qsgd::bind_plan(m);
  qsgd::bind_codes(m);
  qsgd::bind_cost(m, "allreduce_s", &qsgd::allreduce_s);
  qsgd::bind_cost(m, "wire_bytes", &qsgd::wire_bytes);
  qsgd::bind_roll_call(m);
  qsgd::bind_tree(m);
}
