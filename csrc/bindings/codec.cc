// The codec and the collectives by themselves, over numpy arrays: for tests, lessons and
// benchmarks.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>
#include <exception>
#include <thread>

#include "bindings/bindings.h"
#include "collectives/ring_allreduce.h"
#include "collectives/sra_allreduce.h"
#include "quant/wire.h"
#include "transport/thread_transport.h"

namespace py = pybind11;

namespace qsgd {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Bytes = py::array_t<uint8_t, py::array::c_style | py::array::forcecast>;

size_t message_bytes(size_t count, const QuantSpec& spec) {
  return sizeof(WireHeader) + spec.buckets(count) * sizeof(float) + spec.code_bytes(count);
}

// Calls f(begin, count, offset of the norm, offset of the codes) for every bucket.
template <class F>
void for_each_bucket(size_t count, const QuantSpec& spec, F&& f) {
  size_t norm_at = sizeof(WireHeader);
  size_t codes_at = norm_at + spec.buckets(count) * sizeof(float);
  for (size_t begin = 0; begin < count; begin += spec.bucket) {
    const size_t size = std::min<size_t>(spec.bucket, count - begin);
    f(begin, size, norm_at, codes_at);
    norm_at += sizeof(float);
    codes_at += spec.code_bytes(size);
  }
}

Bytes encode(const Floats& x, int bits, uint32_t bucket, const std::string& norm, uint64_t seed,
             uint32_t tensor, uint32_t step, uint32_t rank) {
  const QuantSpec spec = parse_spec(Coding({bits, bucket, norm}));
  const auto count = static_cast<size_t>(x.size());
  Bytes message(static_cast<py::ssize_t>(message_bytes(count, spec)));
  uint8_t* const out = message.mutable_data();
  const float* const in = x.data();
  const NoiseKey key{seed, tensor, step, rank, Phase::kScatter};
  const py::gil_scoped_release no_gil;
  for_each_bucket(count, spec, [&](size_t begin, size_t size, size_t norm_at, size_t codes_at) {
    const float n = encode_bucket(in + begin, size, begin, spec, key, out + codes_at);
    std::memcpy(out + norm_at, &n, sizeof n);
  });
  seal(out, message_bytes(count, spec), spec, 1, count);
  return message;
}

Floats decode(const Bytes& message, size_t count, int bits, uint32_t bucket,
              const std::string& norm) {
  const QuantSpec spec = parse_spec(Coding({bits, bucket, norm}));
  const auto size_bytes = static_cast<size_t>(message.size());
  if (size_bytes != message_bytes(count, spec)) {
    throw usage_error("message of " + std::to_string(size_bytes) + " bytes, expected " +
                      std::to_string(message_bytes(count, spec)) + " for " + std::to_string(count) +
                      " elements");
  }
  verify(message.data(), size_bytes, spec, 1, count, 0);
  Floats out(static_cast<py::ssize_t>(count));
  const uint8_t* const in = message.data();
  float* const to = out.mutable_data();
  const py::gil_scoped_release no_gil;
  for_each_bucket(count, spec, [&](size_t begin, size_t size, size_t norm_at, size_t codes_at) {
    float n;
    std::memcpy(&n, in + norm_at, sizeof n);
    decode_bucket(n, in + codes_at, size, spec, to + begin);
  });
  return out;
}

// One list of tensors per rank; every rank runs on a thread of its own. Reduces in place and
// returns the bytes that each rank sent.
std::vector<uint64_t> thread_allreduce(const std::vector<std::vector<py::array>>& ranks,
                                       const std::string& op, const Coding& coding, uint64_t seed,
                                       const std::vector<uint32_t>& ids, uint32_t step) {
  ReduceArgs args;
  args.op = parse_op(op);
  std::vector<std::vector<ReduceTensor>> tensors(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t t = 0; t < ranks[r].size(); ++t) {
      py::array array = ranks[r][t];
      args.dtype = parse_dtype(py::str(array.dtype()));
      void* const data = array.mutable_data();
      tensors[r].push_back({data, data, static_cast<size_t>(array.size()), ids.at(t), step});
    }
  }
  const int size = static_cast<int>(ranks.size());
  const auto world = std::make_shared<ThreadWorld>(size);
  std::vector<uint64_t> sent(ranks.size());
  std::vector<std::exception_ptr> faults(ranks.size());
  {
    const py::gil_scoped_release no_gil;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto r = static_cast<size_t>(rank);
        ThreadTransport transport(world, rank);
        try {
          if (coding) {
            sra_allreduce(transport, tensors[r], args, parse_spec(coding), seed);
          } else {
            ring_allreduce(transport, tensors[r], args);
          }
        } catch (...) {
          faults[r] = std::current_exception();
          world->abort_flag()->raise("another rank failed");
        }
        sent[r] = transport.bytes_sent();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  for (const std::exception_ptr& fault : faults) {
    if (fault) std::rethrow_exception(fault);
  }
  return sent;
}

}  // namespace
}  // namespace qsgd

void bind_codec(py::module_& m) {
  m.def("encode", &qsgd::encode, py::arg("x"), py::kw_only(), py::arg("bits"),
        py::arg("bucket_size"), py::arg("norm"), py::arg("seed") = 0, py::arg("tensor") = 0,
        py::arg("step") = 0, py::arg("rank") = 0,
        "Code float32 values as one wire message; the same key gives the same bytes.");
  m.def("decode", &qsgd::decode, py::arg("message"), py::kw_only(), py::arg("count"),
        py::arg("bits"), py::arg("bucket_size"), py::arg("norm"),
        "Decode a wire message; refuses one that is corrupt or of another format.");
  m.def("thread_allreduce", &qsgd::thread_allreduce, py::arg("ranks"), py::kw_only(),
        py::arg("op") = "sum", py::arg("coding") = py::none(), py::arg("seed") = 0, py::arg("ids"),
        py::arg("step") = 0,
        "Allreduce in place among threads, one list of arrays per rank; returns bytes sent.");
}
