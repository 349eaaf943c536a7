// Averages of gradient buckets with messages transferred by Python, on the host and on a GPU.
// Memory is given by address, so that torch tensors are not copied and nothing is allocated per
// reduction.
#include "gpu/bucket.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <tuple>

#include "bindings/bindings.h"
#include "collectives/bucket_coder.h"
#include "gpu/library.h"
#include "quant/philox.h"
#include "quant/wire.h"

namespace py = pybind11;

namespace qsgd {
namespace {

using Address = uintptr_t;

template <class T>
T* at_address(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT: an address from torch's data_ptr()
}

BucketTensor tensor_of(size_t at, size_t count, uint32_t id, const OptionalSpec& spec,
                       Address residual, Address owner_residual) {
  return {at, count, id, spec, at_address<float>(residual), at_address<float>(owner_residual)};
}

void succeed(const char* failure) {
  if (failure != nullptr) throw internal_error("GPU kernels: " + std::string(failure));
}

// Rows of 64-bit numbers, for the caller to copy to the device.
py::array_t<uint64_t> rows(const std::vector<gpu::Piece>& pieces) {
  constexpr size_t kColumns = sizeof(gpu::Piece) / sizeof(uint64_t);
  static_assert(kColumns * sizeof(uint64_t) == sizeof(gpu::Piece));
  return py::array_t<uint64_t>(
      {static_cast<py::ssize_t>(pieces.size()), static_cast<py::ssize_t>(kColumns)},
      reinterpret_cast<const uint64_t*>(pieces.data()));
}

// Common part of the GPU coders of one code.
class GpuCoder {
 public:
  GpuCoder(const std::string& library, const CodecSpec& spec, const std::string& dtype)
      : library_(gpu::load_library(library)), spec_(spec), dtype_(parse_dtype(dtype)) {}

 protected:
  gpu::Run run(const std::vector<gpu::Piece>& pieces, Address table, Address nonfinite) const {
    const gpu::Pieces listed{at_address<gpu::Piece>(table), static_cast<uint32_t>(pieces.size()),
                             gpu::buckets(pieces, spec_), gpu::Piece{}};
    return {listed, dtype_, spec_, at_address<uint32_t>(nonfinite)};
  }

  static gpu::Draw draw(uint32_t rank, Phase phase, uint32_t step, Address later) {
    const NoiseKey key{0, 0, step, rank, phase};
    return {step, static_cast<uint32_t>(counter_high(key) >> 32), at_address<uint32_t>(later)};
  }

  const gpu::Library& library_;
  const CodecSpec spec_;
  const DType dtype_;
};

class GpuBucket : GpuCoder {
 public:
  GpuBucket(const std::string& library, const std::vector<BucketTensor>& tensors,
            const std::string& dtype, uint64_t seed, int rank, int size)
      : GpuBucket(library, gpu::Bucket(tensors, seed, rank, size), dtype, rank, size) {}

  size_t stride() const { return bucket_.stride(); }

  py::tuple tables() const {
    return py::make_tuple(rows(bucket_.to_send()), rows(bucket_.to_sum()), rows(bucket_.to_take()));
  }

  void encode(Address x, Address table, Address messages, uint32_t step, Address later,
              Address nonfinite, Address stream) const {
    succeed(library_.encode(at_address<void>(x), run(bucket_.to_send(), table, nonfinite),
                            draw(rank_, Phase::kScatter, step, later),
                            at_address<uint8_t>(messages), at_address<void>(stream)));
  }

  void reduce(Address x, Address table, Address messages, Address result, uint32_t step,
              Address later, Address nonfinite, Address stream) const {
    const gpu::Addends addends{at_address<uint8_t>(messages), bucket_.stride(), size_,
                               static_cast<int>(rank_), 1.0f / static_cast<float>(size_)};
    succeed(library_.sum_encode(addends, at_address<void>(x),
                                run(bucket_.to_sum(), table, nonfinite),
                                draw(rank_, Phase::kGather, step, later),
                                at_address<uint8_t>(result), at_address<void>(stream)));
  }

  void decode(Address results, Address table, Address out, Address nonfinite,
              Address stream) const {
    succeed(library_.decode(at_address<uint8_t>(results), run(bucket_.to_take(), table, nonfinite),
                            at_address<void>(out), at_address<void>(stream)));
  }

 private:
  GpuBucket(const std::string& library, gpu::Bucket bucket, const std::string& dtype, int rank,
            int size)
      : GpuCoder(library, bucket.spec(), dtype),
        bucket_(std::move(bucket)),
        rank_(static_cast<uint32_t>(rank)),
        size_(size) {}

  const gpu::Bucket bucket_;
  const uint32_t rank_;
  const int size_;
};

// Complete tensors, each in a separate message with space for a header.
class GpuMessages : GpuCoder {
 public:
  // Of a tensor: first element in the array, number of elements, id, and offset of its message.
  using Place = std::tuple<size_t, size_t, uint32_t, size_t>;

  GpuMessages(const std::string& library, const std::vector<Place>& places, const CodecSpec& spec,
              const std::string& dtype, uint64_t seed)
      : GpuCoder(library, spec, dtype) {
    check(spec);
    for (const auto& [at, count, id, message_at] : places) {
      gpu::Piece piece{};
      piece.at = at;
      piece.count = count;
      piece.tensor = Philox::mix(seed, id);
      piece.scales_at = message_at + sizeof(WireHeader);
      piece.codes_at = piece.scales_at + spec.scales(count) * sizeof(float);
      piece.first_bucket = gpu::buckets(pieces_, spec);
      pieces_.push_back(piece);
    }
  }

  py::array_t<uint64_t> table() const { return rows(pieces_); }

  void encode(Address x, Address table, Address messages, uint32_t step, uint32_t rank,
              Address stream) const {
    succeed(library_.encode(at_address<void>(x), run(pieces_, table, 0),
                            draw(rank, Phase::kScatter, step, 0), at_address<uint8_t>(messages),
                            at_address<void>(stream)));
  }

  void decode(Address messages, Address table, Address out, Address stream) const {
    succeed(library_.decode(at_address<uint8_t>(messages), run(pieces_, table, 0),
                            at_address<void>(out), at_address<void>(stream)));
  }

  void sum(Address x, Address table, Address messages, size_t stride, int ranks, int own,
           float factor, Address out, Address stream) const {
    const gpu::Addends addends{at_address<uint8_t>(messages), stride, ranks, own, factor};
    succeed(library_.sum(addends, at_address<void>(x), run(pieces_, table, 0),
                         at_address<void>(out), at_address<void>(stream)));
  }

 private:
  std::vector<gpu::Piece> pieces_;
};

void bind_tensor(py::module_& m) {
  py::class_<BucketTensor>(m, "BucketTensor")
      .def(py::init(&tensor_of), py::kw_only(), py::arg("at"), py::arg("count"), py::arg("id"),
           py::arg("spec") = py::none(), py::arg("residual") = 0, py::arg("owner_residual") = 0,
           "A tensor of a bucket; residuals are addresses of float32, or 0.");
  m.def("owned_elements", &owned_elements, py::arg("count"), py::kw_only(), py::arg("spec"),
        py::arg("id"), py::arg("size"), py::arg("rank"),
        "The first element of a tensor whose sums the rank codes, and the one after the last: its "
        "owner_residual has these.");
}

void bind_host_coder(py::module_& m) {
  using Free = py::call_guard<py::gil_scoped_release>;
  py::class_<Workers>(m, "Workers").def(py::init<int>(), py::arg("threads"));
  py::class_<BucketCoder>(m, "BucketCoder",
                          "Codes the average of a bucket: begin, then encode, reduce and decode of "
                          "each wave. Arguments are addresses; see "
                          "csrc/collectives/bucket_coder.h. Several may share the workers, one at "
                          "a time.")
      .def(py::init([](const std::vector<BucketTensor>& tensors, const std::string& dtype,
                       uint64_t seed, int rank, int size, size_t limit, Workers* workers) {
             return std::make_unique<BucketCoder>(tensors, parse_dtype(dtype), seed, rank, size,
                                                  limit, workers);
           }),
           py::arg("tensors"), py::kw_only(), py::arg("dtype"), py::arg("seed"), py::arg("rank"),
           py::arg("size"), py::arg("limit") = 0, py::arg("workers"), py::keep_alive<1, 8>())
      .def_property_readonly("waves", &BucketCoder::waves)
      .def("bytes", &BucketCoder::bytes, py::arg("wave"), py::arg("owner"))
      .def(
          "begin",
          [](BucketCoder& c, Address bucket, const std::vector<uint32_t>& steps) {
            c.begin(at_address<void>(bucket), steps);
          },
          py::arg("bucket"), py::arg("steps"))
      .def(
          "encode",
          [](BucketCoder& c, size_t wave, Address messages) {
            c.encode(wave, at_address<uint8_t>(messages));
          },
          py::arg("wave"), py::arg("messages"), Free())
      .def(
          "reduce",
          [](BucketCoder& c, size_t wave, Address messages, Address result) {
            c.reduce(wave, at_address<uint8_t>(messages), at_address<uint8_t>(result));
          },
          py::arg("wave"), py::arg("messages"), py::arg("result"), Free())
      .def(
          "decode",
          [](BucketCoder& c, size_t wave, Address results, size_t stride) {
            c.decode(wave, at_address<uint8_t>(results), stride);
          },
          py::arg("wave"), py::arg("results"), py::arg("stride"), Free())
      .def("quality", [](const BucketCoder& c) {
        const Quality all = c.quality();
        return py::make_tuple(all.error, all.energy);
      });
}

// All work is queued on the caller's stream; nothing blocks.
void bind_gpu_coder(py::module_& m) {
  m.def(
      "gpu_fault",
      [](const std::string& library, int device) {
        return gpu::fault_of(gpu::load_library(library), device);
      },
      py::arg("library"), py::arg("device"),
      "Why the kernels do not work on a visible device; empty if they do.");
  m.def(
      "gpu_platform",
      [](const std::string& library) { return gpu::load_library(library).platform; },
      py::arg("library"), "Compiler and targets of a library of GPU kernels.");
  m.def("nccl_version", gpu::nccl_version, py::arg("library"),
        "The version of NCCL or RCCL, such as 22703 for 2.27.3; 0 if it cannot be loaded.");
  py::class_<GpuBucket>(
      m, "GpuBucket",
      "Codes the average of a bucket in device memory, on a stream: encode messages "
      "to the owners, reduce those of all ranks, decode those of the owners. "
      "Arguments are addresses; see csrc/gpu/bucket.h.")
      .def(py::init<const std::string&, const std::vector<BucketTensor>&, const std::string&,
                    uint64_t, int, int>(),
           py::arg("library"), py::arg("tensors"), py::kw_only(), py::arg("dtype"), py::arg("seed"),
           py::arg("rank"), py::arg("size"))
      .def_property_readonly("stride", &GpuBucket::stride,
                             "Bytes between the messages of consecutive ranks.")
      .def("tables", &GpuBucket::tables,
           "For encode, reduce and decode: uint64 rows, to be copied to device memory.")
      .def("encode", &GpuBucket::encode, py::arg("x"), py::kw_only(), py::arg("table"),
           py::arg("messages"), py::arg("step") = 0, py::arg("later") = 0, py::arg("nonfinite") = 0,
           py::arg("stream") = 0)
      .def("reduce", &GpuBucket::reduce, py::arg("x"), py::kw_only(), py::arg("table"),
           py::arg("messages"), py::arg("result"), py::arg("step") = 0, py::arg("later") = 0,
           py::arg("nonfinite") = 0, py::arg("stream") = 0)
      .def("decode", &GpuBucket::decode, py::arg("results"), py::kw_only(), py::arg("table"),
           py::arg("out"), py::arg("nonfinite") = 0, py::arg("stream") = 0);
  py::class_<GpuMessages>(m, "GpuMessages",
                          "Codes tensors in device memory, each into a message like that of "
                          "encode_into(), but without a header; on a stream. `places` has for each "
                          "tensor its first element in the array, the number of elements, the id "
                          "that keys its noise, and the offset of its message. Arguments are "
                          "addresses.")
      .def(py::init<const std::string&, const std::vector<GpuMessages::Place>&, const CodecSpec&,
                    const std::string&, uint64_t>(),
           py::arg("library"), py::arg("places"), py::kw_only(), py::arg("spec"), py::arg("dtype"),
           py::arg("seed"))
      .def("table", &GpuMessages::table, "uint64 rows, to be copied to device memory.")
      .def("encode", &GpuMessages::encode, py::arg("x"), py::kw_only(), py::arg("table"),
           py::arg("messages"), py::arg("step"), py::arg("rank"), py::arg("stream") = 0)
      .def("decode", &GpuMessages::decode, py::arg("messages"), py::kw_only(), py::arg("table"),
           py::arg("out"), py::arg("stream") = 0)
      .def("sum", &GpuMessages::sum, py::arg("x"), py::kw_only(), py::arg("table"),
           py::arg("messages"), py::arg("stride"), py::arg("ranks"), py::arg("own"),
           py::arg("factor"), py::arg("out"), py::arg("stream") = 0,
           "Write the sum over ranks times `factor` to `out`, which has the layout of x: rank r's "
           "message is at stride * r, but rank `own` adds x.");
}

}  // namespace
}  // namespace qsgd

void bind_bucket(py::module_& m) {
  qsgd::bind_tensor(m);
  qsgd::bind_host_coder(m);
  qsgd::bind_gpu_coder(m);
}
