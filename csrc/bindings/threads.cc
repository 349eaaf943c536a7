// Allreduce among threads of this process, one per rank: for tests and lessons.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <thread>

#include "bindings/bindings.h"
#include "collectives/allreduce.h"
#include "collectives/segments.h"
#include "transport/thread_transport.h"

namespace py = pybind11;

namespace qsgd {
namespace {

using Arrays = std::vector<py::array>;
// By rank and tensor; None: no error feedback.
using Residuals = std::optional<std::vector<std::vector<py::array_t<float>>>>;

// Outcome of one rank.
struct RankReport {
  uint64_t wire_bytes = 0;
  size_t peak_bytes = 0;
  uint64_t most_waiting = 0;
  std::exception_ptr fault;
};

struct Job {
  std::vector<std::vector<ReduceTensor>> tensors;  // by rank
  ReduceArgs args;
  OptionalSpec coding;
  std::string algorithm;
  uint64_t seed;
  int threads;
  size_t segment;
};

float* residual_of(const Residuals& residuals, size_t rank, size_t tensor) {
  if (!residuals) return nullptr;
  py::array_t<float> array = residuals->at(rank).at(tensor);
  return array.mutable_data();
}

void run_rank(Job& job, const std::shared_ptr<ThreadWorld>& world, int rank, RankReport& report) {
  ThreadTransport transport(world, rank);
  std::vector<ReduceTensor>& tensors = job.tensors[static_cast<size_t>(rank)];
  try {
    Workers workers(job.threads);
    Pipelining pipelining;
    pipelining.segment = job.segment;
    Communicator communicator{transport, nullptr, &workers, &pipelining};
    allreduce(communicator, tensors, job.args, job.coding.has_value(),
              parse_algorithm(job.algorithm), job.seed);
    report.peak_bytes = pipelining.peak_bytes;
  } catch (...) {
    report.fault = std::current_exception();
    world->abort_flag()->raise("another rank failed");
  }
  report.wire_bytes = transport.bytes_sent();
}

std::vector<RankReport> run(Job& job) {
  const int size = static_cast<int>(job.tensors.size());
  const auto world = std::make_shared<ThreadWorld>(size);
  std::vector<RankReport> reports(job.tensors.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back(
        [&, rank] { run_rank(job, world, rank, reports[static_cast<size_t>(rank)]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (RankReport& report : reports) report.most_waiting = world->most_waiting();
  return reports;
}

py::dict describe(const RankReport& report, const std::vector<ReduceTensor>& tensors) {
  py::list error, energy, input_finite, result_finite;
  for (const ReduceTensor& tensor : tensors) {
    error.append(tensor.coding_error);
    energy.append(tensor.coded_energy);
    input_finite.append(tensor.input_finite);
    result_finite.append(tensor.result_finite);
  }
  return py::dict(py::arg("wire_bytes") = report.wire_bytes,
                  py::arg("peak_bytes") = report.peak_bytes,
                  py::arg("most_waiting") = report.most_waiting, py::arg("coding_error") = error,
                  py::arg("coded_energy") = energy, py::arg("input_finite") = input_finite,
                  py::arg("result_finite") = result_finite);
}

py::list thread_allreduce(const std::vector<Arrays>& ranks, const std::string& op,
                          const OptionalSpec& coding, const std::string& algorithm, uint64_t seed,
                          const std::vector<uint32_t>& ids, uint32_t step,
                          const Residuals& residuals, const Residuals& owner_residuals, int threads,
                          size_t segment, const std::optional<std::string>& dtype,
                          const std::vector<CodecSpec>& codings) {
  Job job{{}, {}, coding, algorithm, seed, threads, segment};
  job.args.op = parse_op(op);
  job.tensors.resize(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t t = 0; t < ranks[r].size(); ++t) {
      py::array array = ranks[r][t];
      job.args.dtype = parse_dtype(dtype ? *dtype : std::string(py::str(array.dtype())));
      void* const data = array.mutable_data();
      ReduceTensor tensor{data, data, static_cast<size_t>(array.size()), ids.at(t), step};
      if (coding) tensor.spec = codings.empty() ? *coding : codings.at(t);
      tensor.residual = residual_of(residuals, r, t);
      tensor.owner_residual = residual_of(owner_residuals, r, t);
      job.tensors[r].push_back(tensor);
    }
  }
  std::vector<RankReport> reports;
  {
    const py::gil_scoped_release no_gil;
    reports = run(job);
  }
  py::list described;
  for (size_t r = 0; r < reports.size(); ++r) {
    if (reports[r].fault) std::rethrow_exception(reports[r].fault);
    described.append(describe(reports[r], job.tensors[r]));
  }
  return described;
}

}  // namespace
}  // namespace qsgd

void bind_threads(py::module_& m) {
  m.def("thread_allreduce", &qsgd::thread_allreduce, py::arg("ranks"), py::kw_only(),
        py::arg("op") = "sum", py::arg("coding") = py::none(), py::arg("algorithm") = "auto",
        py::arg("seed") = 0, py::arg("ids"), py::arg("step") = 0, py::arg("residuals") = py::none(),
        py::arg("owner_residuals") = py::none(), py::arg("threads") = 1, py::arg("segment") = 0,
        py::arg("dtype") = py::none(), py::arg("codings") = py::tuple(),
        "Allreduce in place among threads, one list of arrays per rank. Returns for each rank the "
        "bytes sent, the memory allocated, the maximum number of waiting messages of a stream, and "
        "by tensor the coding error and whether values were finite. `codings`, one for each "
        "tensor, replace `coding`.");
}
