// The collectives on the calling thread, without an engine or negotiation.
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/numpy.h>

#include <array>
#include <numeric>

#include "bindings/bindings.h"
#include "collectives/allreduce.h"
#include "collectives/exchange.h"
#include "collectives/reducescatter.h"
#include "planner/measure.h"
#include "transport/mpi_transport.h"
#include "transport/subset_transport.h"
#include "transport/thread_transport.h"

namespace py = pybind11;

namespace qsgd {
namespace {

// Contiguous memory of a numpy array.
struct Buffer {
  Buffer(const py::array& array, bool writeable) {
    if (!(array.flags() & py::array::c_style)) {
      throw usage_error("an array is not contiguous; pass numpy.ascontiguousarray(x)");
    }
    if (writeable && !array.writeable()) throw usage_error("a result array is read-only");
    data = const_cast<void*>(array.data());
    count = static_cast<size_t>(array.size());
    bytes = static_cast<size_t>(array.nbytes());
    dtype = dtype_of(array);
  }
  // numpy computes a type's name in Python, which takes longer than a small allreduce.
  static std::string dtype_of(const py::array& array) {
    const std::string bits = std::to_string(array.itemsize() * 8);
    switch (array.dtype().kind()) {
      case 'f':
        return "float" + bits;
      case 'i':
        return "int" + bits;
      case 'u':
        return "uint" + bits;
      default:
        return py::str(array.dtype());
    }
  }
  void* data;
  size_t count, bytes;
  std::string dtype;
};

size_t total(const std::vector<size_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), size_t{0});
}

// Converts element counts per rank to bytes.
std::vector<size_t> sizes_of(const std::vector<size_t>& counts, const py::array& array, int ranks) {
  if (counts.size() != static_cast<size_t>(ranks)) {
    throw usage_error(std::to_string(counts.size()) + " counts for " + std::to_string(ranks) +
                      " ranks; pass one per rank");
  }
  std::vector<size_t> sizes = counts;
  for (size_t& size : sizes) size *= static_cast<size_t>(array.itemsize());
  return sizes;
}

void require_bytes(const char* what, const Buffer& buffer, size_t expected) {
  if (buffer.bytes == expected) return;
  throw usage_error(std::string(what) + " has " + std::to_string(buffer.bytes) +
                    " bytes and its counts add up to " + std::to_string(expected) +
                    "; make them equal");
}

// Owner of the objects that a Communicator refers to.
class OwningCommunicator {
 public:
  OwningCommunicator(std::unique_ptr<Transport> transport, std::unique_ptr<SharedNode> node,
                     int threads, std::shared_ptr<ThreadWorld> world)
      : world_(std::move(world)),
        transport_(std::move(transport)),
        node_(std::move(node)),
        workers_(threads > 1 ? std::make_unique<Workers>(threads) : nullptr) {}

  Communicator get() { return {*transport_, node_.get(), workers_.get()}; }
  Transport& transport() { return *transport_; }

  // From now on, the death of a rank ends this rank's operations, and finally this process.
  void watch(std::vector<Lifeline::Peer> peers, double grace_s) {
    lifeline_ = std::make_unique<Lifeline>(transport_->rank(), std::move(peers),
                                           transport_->shared_abort_flag(), nullptr, grace_s);
  }
  void give_up(const std::string& reason) {
    AbortFlag& abort = transport_->abort_flag();
    if (!abort.raised() && lifeline_) {
      lifeline_->announce("rank " + std::to_string(transport_->rank()) +
                          " cannot continue: " + reason);
    }
    abort.raise(reason);
    abort.set_noticed();
  }
  void close() {
    if (lifeline_) lifeline_->close(!transport_->abort_flag().raised());
    lifeline_.reset();
  }

 private:
  const std::shared_ptr<ThreadWorld> world_;
  const std::unique_ptr<Transport> transport_;
  const std::unique_ptr<SharedNode> node_;
  const std::unique_ptr<Workers> workers_;
  std::unique_ptr<Lifeline> lifeline_;
};

using Owner = Threaded<OwningCommunicator>;

// Uses the transport of `parent`, which must outlive it.
Owner subset(OwningCommunicator& parent, const std::vector<int>& ranks) {
  return Owner(new OwningCommunicator(std::make_unique<SubsetTransport>(parent.transport(), ranks),
                                      nullptr, 1, nullptr));
}

Owner over_mpi(const MpiFacts& facts, const std::optional<NodeFacts>& node, int threads) {
  auto transport = make_mpi_transport(facts);
  auto shared = node ? std::make_unique<SharedNode>(*node, *transport) : nullptr;
  return Owner(new OwningCommunicator(std::move(transport), std::move(shared), threads, nullptr));
}

Owner over_threads(const std::shared_ptr<ThreadWorld>& world, int rank,
                   const std::optional<int>& ranks_per_node, int threads) {
  auto transport = std::make_unique<ThreadTransport>(world, rank);
  auto shared = ranks_per_node ? make_thread_node(*world, *transport, *ranks_per_node) : nullptr;
  return Owner(new OwningCommunicator(std::move(transport), std::move(shared), threads, world));
}

// Runs without the GIL. After an error in a collective the other ranks would wait, so they are
// informed. Usage errors are raised on every rank before anything is sent.
template <class F>
void run(OwningCommunicator& owner, F&& collective) {
  const py::gil_scoped_release no_gil;
  AbortFlag& abort = owner.transport().abort_flag();
  try {
    abort.check();
    collective();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUsage) owner.give_up(error.what());
    throw;
  } catch (const std::exception& error) {
    owner.give_up(error.what());
    throw;
  }
}

// `tensors` contains arrays, reduced in place, or pairs (source, target).
std::vector<ReduceTensor> list_tensors(const py::list& tensors, const std::vector<uint32_t>& ids,
                                       uint32_t step, std::string& dtype) {
  std::vector<ReduceTensor> list;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool pair = py::isinstance<py::tuple>(tensors[i]);
    const auto source =
        pair ? tensors[i].cast<py::tuple>()[0].cast<py::array>() : tensors[i].cast<py::array>();
    const auto target = pair ? tensors[i].cast<py::tuple>()[1].cast<py::array>() : source;
    const Buffer in(source, false), out(target, true);
    if (dtype.empty()) dtype = in.dtype;
    if (in.count != out.count || in.bytes != out.bytes ||
        in.bytes != in.count * facts(parse_dtype(dtype)).size) {
      throw usage_error("tensor " + std::to_string(i) + " of the list: source of " +
                        std::to_string(in.count) + " " + in.dtype + ", target of " +
                        std::to_string(out.count) + " " + out.dtype + ", list of " + dtype +
                        "; all must have one element type and pairs one size");
    }
    list.push_back(
        {in.data, out.data, in.count, ids.empty() ? static_cast<uint32_t>(i) : ids.at(i), step});
  }
  return list;
}

py::dict report(const std::vector<ReduceTensor>& tensors, const BytesGiven& before,
                const BytesGiven& after) {
  double error = 0, energy = 0;
  bool input_finite = true, result_finite = true;
  for (const ReduceTensor& tensor : tensors) {
    error += tensor.coding_error;
    energy += tensor.coded_energy;
    input_finite &= tensor.input_finite;
    result_finite &= tensor.result_finite;
  }
  // Cached, because creating six strings takes nearly as long as a small allreduce.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<std::array<py::str, 6>> storage;
  const std::array<py::str, 6>& keys =
      storage
          .call_once_and_store_result([] {
            return std::array<py::str, 6>{"wire_bytes",   "shared_memory_bytes", "coding_error",
                                          "coded_energy", "input_finite",        "result_finite"};
          })
          .get_stored();
  py::dict d;
  d[keys[0]] = after.total() - before.total();
  d[keys[1]] = after.in_memory - before.in_memory;
  d[keys[2]] = error;
  d[keys[3]] = energy;
  d[keys[4]] = input_finite;
  d[keys[5]] = result_finite;
  return d;
}

py::dict allreduce_list(OwningCommunicator& owner, const py::list& tensors, const std::string& op,
                        double prescale, double postscale, const OptionalSpec& coding,
                        const std::string& algorithm, uint64_t seed,
                        const std::vector<uint32_t>& ids, uint32_t step, std::string dtype,
                        const std::vector<CodecSpec>& codings) {
  std::vector<ReduceTensor> list = list_tensors(tensors, ids, step, dtype);
  if (!codings.empty() && (coding || codings.size() != list.size())) {
    throw usage_error(std::to_string(codings.size()) + " codings for " +
                      std::to_string(list.size()) +
                      " tensors; pass one for each, or one `coding` for all");
  }
  for (size_t i = 0; i < list.size() && coding; ++i) list[i].spec = *coding;
  for (size_t i = 0; i < codings.size(); ++i) list[i].spec = codings[i];
  const ReduceArgs args{dtype.empty() ? DType::kFloat32 : parse_dtype(dtype), parse_op(op),
                        prescale, postscale};
  const Algorithm chosen = parse_algorithm(algorithm);
  Communicator communicator = owner.get();
  const BytesGiven before = bytes_given(communicator);
  const bool compressed = coding || !codings.empty();
  run(owner, [&] { allreduce(communicator, list, args, compressed, chosen, seed); });
  return report(list, before, bytes_given(communicator));
}

// An allreduce to be called many times, like MPI's persistent collectives: Python's arguments are
// parsed once.
class PreparedAllreduce {
 public:
  PreparedAllreduce(OwningCommunicator& owner, py::list tensors, const std::string& op,
                    const OptionalSpec& coding, const std::string& algorithm, uint64_t seed,
                    bool judged)
      : owner_(owner),
        arrays_(std::move(tensors)),
        coding_(coding),
        algorithm_(parse_algorithm(algorithm)),
        seed_(seed) {
    std::string dtype;
    list_ = list_tensors(arrays_, {}, 0, dtype);
    for (ReduceTensor& tensor : list_) tensor.judged = judged;
    args_.dtype = parse_dtype(dtype.empty() ? "float32" : dtype);
    args_.op = parse_op(op);
  }

  // Returns the bytes that this rank sent in messages. Every call is a step, with different noise.
  uint64_t call() {
    const uint64_t before = owner_.transport().bytes_sent();
    run(owner_, [&] {
      Communicator communicator = owner_.get();
      allreduce(communicator, list_, args_, coding_, algorithm_, seed_);
    });
    for (ReduceTensor& tensor : list_) ++tensor.step;
    return owner_.transport().bytes_sent() - before;
  }

 private:
  OwningCommunicator& owner_;
  const py::list arrays_;  // keeps the memory alive
  const OptionalSpec coding_;
  const Algorithm algorithm_;
  const uint64_t seed_;
  ReduceArgs args_;
  std::vector<ReduceTensor> list_;
};

std::unique_ptr<PreparedAllreduce> prepare(OwningCommunicator& owner, py::list tensors,
                                           const std::string& op, const OptionalSpec& coding,
                                           const std::string& algorithm, uint64_t seed,
                                           bool judged) {
  return std::make_unique<PreparedAllreduce>(owner, std::move(tensors), op, coding, algorithm, seed,
                                             judged);
}

Machine measure_machine(OwningCommunicator& owner, const std::vector<CodecSpec>& codecs,
                        const std::vector<CodecSpec>& untried, int ranks_per_node) {
  Machine machine;
  run(owner, [&] {
    Communicator communicator = owner.get();
    machine = measure(communicator, ranks_per_node, codecs, untried);
  });
  return machine;
}

void broadcast_array(OwningCommunicator& owner, const py::array& array, int root) {
  const Buffer buffer(array, true);
  run(owner, [&] { broadcast(owner.transport(), buffer.data, buffer.bytes, root); });
}

void allgather_arrays(OwningCommunicator& owner, const py::array& source, const py::array& target,
                      const std::vector<size_t>& counts) {
  Transport& transport = owner.transport();
  const std::vector<size_t> sizes = sizes_of(counts, target, transport.size());
  const Buffer in(source, false), out(target, true);
  require_bytes("source", in, sizes[static_cast<size_t>(transport.rank())]);
  require_bytes("target", out, total(sizes));
  run(owner, [&] { allgatherv(transport, in.data, out.data, sizes); });
}

void alltoall_arrays(OwningCommunicator& owner, const py::array& source,
                     const std::vector<size_t>& send_counts, const py::array& target,
                     const std::vector<size_t>& receive_counts) {
  Transport& transport = owner.transport();
  const std::vector<size_t> send = sizes_of(send_counts, source, transport.size());
  const std::vector<size_t> receive = sizes_of(receive_counts, target, transport.size());
  const Buffer in(source, false), out(target, true);
  require_bytes("source", in, total(send));
  require_bytes("target", out, total(receive));
  run(owner, [&] { alltoallv(transport, in.data, send, out.data, receive); });
}

bool reducescatter_arrays(OwningCommunicator& owner, const py::array& source,
                          const py::array& target, const std::vector<size_t>& counts,
                          const std::string& op, double prescale, double postscale,
                          const std::string& dtype) {
  Transport& transport = owner.transport();
  const std::vector<size_t> sizes = sizes_of(counts, source, transport.size());
  const Buffer in(source, false), out(target, true);
  require_bytes("source", in, total(sizes));
  require_bytes("target", out, sizes[static_cast<size_t>(transport.rank())]);
  const ReduceArgs args{parse_dtype(dtype.empty() ? in.dtype : dtype), parse_op(op), prescale,
                        postscale};
  bool finite = true;
  run(owner, [&] { finite = reducescatter(transport, in.data, out.data, counts, args); });
  return finite;
}

}  // namespace
}  // namespace qsgd

std::vector<qsgd::Lifeline::Peer> peers_of(const Peers& peers) {
  std::vector<qsgd::Lifeline::Peer> list;
  for (const auto& [fd, rank, label] : peers) list.push_back({fd, rank, label});
  return list;
}

void bind_communicator(py::module_& m) {
  using namespace qsgd;
  py::class_<NodeFacts>(m, "NodeFacts")
      .def(py::init([](std::vector<std::vector<int>> nodes, std::vector<std::uintptr_t> bases) {
             return NodeFacts{std::move(nodes), std::move(bases)};
           }),
           py::kw_only(), py::arg("nodes"), py::arg("bases"))
      .def_readonly("nodes", &NodeFacts::nodes);
  m.attr("REGION_BYTES") = SharedNode::kRegionBytes;
  const auto names_of = [](const auto& counts) {
    py::list names;
    for (const Algorithm algorithm : all_algorithms()) {
      if (counts(algorithm)) names.append(name_of(algorithm));
    }
    return py::tuple(names);
  };
  m.attr("ALGORITHMS") = names_of([](Algorithm) { return true; });
  m.attr("COMPRESSED_ALGORITHMS") = names_of(is_compressed);

  py::class_<PreparedAllreduce>(m, "PreparedAllreduce")
      .def("__call__", &PreparedAllreduce::call, "Reduce in place; returns the bytes sent.");

  py::class_<OwningCommunicator, Owner>(m, "Communicator")
      .def_static("over_mpi", &over_mpi, py::arg("facts"), py::arg("node") = py::none(),
                  py::arg("threads") = 1)
      .def_static("over_threads", &over_threads, py::arg("world"), py::arg("rank"),
                  py::arg("ranks_per_node") = py::none(), py::arg("threads") = 1)
      .def("allreduce", &allreduce_list, py::arg("tensors"), py::kw_only(), py::arg("op") = "sum",
           py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("coding") = py::none(),
           py::arg("algorithm") = "auto", py::arg("seed") = 0,
           py::arg("ids") = std::vector<uint32_t>(), py::arg("step") = 0, py::arg("dtype") = "",
           py::arg("codings") = py::tuple(),
           "Reduce arrays, in place or as (source, target); returns bytes, coding error, "
           "finiteness.")
      .def("prepare", &prepare, py::arg("tensors"), py::kw_only(), py::arg("op") = "sum",
           py::arg("coding") = py::none(), py::arg("algorithm") = "auto", py::arg("seed") = 0,
           py::arg("judged") = true, py::keep_alive<0, 1>(),
           "An allreduce of these arrays in place, to be called many times; each call is a step. "
           "judged: measure the coding error, as in training.")
      .def("broadcast", &broadcast_array, py::arg("array"), py::kw_only(), py::arg("root"))
      .def("measure", &measure_machine, py::arg("codecs"), py::kw_only(),
           py::arg("untried") = std::vector<CodecSpec>(), py::arg("ranks_per_node") = 1,
           "Measure links and codecs; the same on every rank.")
      .def("allgatherv", &allgather_arrays, py::arg("source"), py::arg("target"), py::kw_only(),
           py::arg("counts"), "Gather every rank's elements; counts has each rank's number.")
      .def("alltoallv", &alltoall_arrays, py::arg("source"), py::arg("send_counts"),
           py::arg("target"), py::arg("receive_counts"),
           "Send each rank its part of source; counts are elements per rank.")
      .def("reducescatter", &reducescatter_arrays, py::arg("source"), py::arg("target"),
           py::kw_only(), py::arg("counts"), py::arg("op") = "sum", py::arg("prescale") = 1.0,
           py::arg("postscale") = 1.0, py::arg("dtype") = "",
           "Reduce, and keep this rank's part; returns whether it is finite.")
      .def("barrier",
           [](OwningCommunicator& owner) { run(owner, [&] { barrier(owner.transport()); }); })
      .def("subset", &subset, py::arg("ranks"), py::keep_alive<0, 1>(),
           "A separate communicator of some of the ranks, in this order.")
      .def(
          "watch",
          [](OwningCommunicator& owner, const Peers& peers, double grace_s) {
            owner.watch(peers_of(peers), grace_s);
          },
          py::arg("peers"), py::arg("grace_s"))
      .def("close", &OwningCommunicator::close, py::call_guard<py::gil_scoped_release>())
      .def("bytes_sent", [](OwningCommunicator& owner) { return owner.transport().bytes_sent(); })
      .def_property_readonly("rank",
                             [](OwningCommunicator& owner) { return owner.transport().rank(); })
      .def_property_readonly("size",
                             [](OwningCommunicator& owner) { return owner.transport().size(); });
}
