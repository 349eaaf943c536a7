// The collectives of a communicator (nccl.h).
#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "collectives/node_shards.h"
#include "gpu/library.h"
#include "gpu/nccl.h"

namespace qsgd::gpu {
namespace {

constexpr int kInt8 = 0;

// NCCL's numbers of types and operations, in the order of DType and ReduceOp; -1: not supported,
// reduced on the host.
constexpr std::array<int, kDTypes> kTypes{1, kInt8, -1, 2, 4, 6, 9, 7, 8};
constexpr std::array<int, kReduceOps> kOps{0, 0, 3, 2, 1, -1};

int type_of(DType dtype) { return kTypes.at(static_cast<size_t>(dtype)); }
int op_of(ReduceOp op) { return kOps.at(static_cast<size_t>(op)); }

size_t sum(const std::vector<size_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), size_t{0});
}

// `to`: null to look for NaN and Inf only.
Span span(const void* from, const void* to, size_t count) {
  return {reinterpret_cast<uint64_t>(from), reinterpret_cast<uint64_t>(to), count, 0};
}

// Queues scaled copies. `nonfinite`: null, or a flag of each span.
void scale(Device& device, std::vector<Span> list, DType dtype, double factor, int divisor,
           uint32_t* nonfinite) {
  uint64_t blocks = 0;
  for (Span& each : list) {
    each.first_block = blocks;
    blocks += (each.count + kScaled - 1) / kScaled;
  }
  const Spans spans{device.upload(list), static_cast<uint32_t>(list.size()), blocks};
  device.require(device.library().scale(spans, dtype, factor, divisor, nonfinite, device.stream()));
}

}  // namespace

bool Nccl::reduces(const ReduceArgs& args) {
  const bool extreme = args.op == ReduceOp::kMin || args.op == ReduceOp::kMax;
  return type_of(args.dtype) >= 0 && op_of(args.op) >= 0 &&
         !(extreme && facts(args.dtype).floating);
}

// Memory of a call on the communicator's device: the caller's, or a copy if that is elsewhere.
class Nccl::Local {
 public:
  Local(Device& device, const void* data, size_t size_bytes, const Place* place)
      : device_(device),
        data_(static_cast<uint8_t*>(const_cast<void*>(data))),
        size_bytes_(size_bytes),
        copy_(place == &device ? DeviceMemory() : DeviceMemory(device, size_bytes)) {}

  uint8_t* data() const { return copy_.data() == nullptr ? data_ : copy_.data(); }
  // Queue copies from and to the caller's memory, if it is elsewhere.
  void fetch() { move(data(), data_); }
  void deliver() { move(data_, data()); }

 private:
  void move(uint8_t* to, const uint8_t* from) {
    if (to != from) device_.copy(to, from, size_bytes_);
  }

  Device& device_;
  uint8_t* const data_;
  const size_t size_bytes_;
  const DeviceMemory copy_;
};

// The tensors of a reduction in the communicator's device, in place or as copies.
class Nccl::Tensors {
 public:
  Tensors(Device& device, std::vector<ReduceTensor>& tensors, DType dtype)
      : device_(device), dtype_(dtype), element_(facts(dtype).size) {
    for (ReduceTensor& tensor : tensors) {
      add(tensor);
      runs_.push_back({all_.size() - 1, 0, tensor.count, count_});
      count_ += tensor.count;
    }
  }

  // Number of elements; section(): elements from one owner's first to the next one's, after cut().
  size_t count() const { return count_; }
  size_t section() const { return section_; }
  // Memory of a single tensor; null if there are several.
  const void* in() const { return all_.size() == 1 ? all_.front().in : nullptr; }
  void* out() const { return all_.size() == 1 ? all_.front().out : nullptr; }
  uint8_t* packed() const { return packed_.data(); }

  // Records NaN and Inf from now on.
  void track_finite() { tracks_finite_ = true; }

  // Lays the packed tensors out by owner: the owners' shards in sections of equal size.
  void cut(int owners) {
    runs_.clear();
    std::vector<size_t> sizes;
    for (int owner = 0; owner < owners; ++owner) {
      size_t at = 0;
      for (size_t t = 0; t < all_.size(); ++t) {
        const ReduceTensor& tensor = *all_[t].tensor;
        const Range range = owned(tensor.count, tensor.spec.bucket, tensor.id, owners, owner);
        runs_.push_back({t, range.begin, range.size(), at});
        at += range.size();
      }
      sizes.push_back(at);
    }
    section_ = *std::max_element(sizes.begin(), sizes.end());
    for (size_t r = 0; r < runs_.size(); ++r) runs_[r].at += r / all_.size() * section_;
    count_ = section_ * static_cast<size_t>(owners);
  }
  // The owner's shards, in the packed memory.
  std::vector<ReduceTensor> shards(int owner) const {
    std::vector<ReduceTensor> shards;
    for (size_t t = 0; t < all_.size(); ++t) {
      const Run& run = runs_[static_cast<size_t>(owner) * all_.size() + t];
      const Range range{run.begin, run.begin + run.count};
      ReduceTensor& shard = shards.emplace_back(shard_of(*all_[t].tensor, range, element_));
      shard.in = shard.out = packed_.data() + run.at * element_;
      shard.place = &device_;
    }
    return shards;
  }

  // Copies all tensors to contiguous memory, multiplied by `factor`.
  void pack(double factor) {
    packed_ = DeviceMemory(device_, count_ * element_);
    move(factor, 1, &Tensors::source, &Tensors::place_in_packed, inputs());
  }
  void unpack(double factor, int divisor) {
    move(factor, divisor, &Tensors::place_in_packed, &Tensors::result, results());
  }
  // For a single tensor: checks its input; scale(): scales and checks its result.
  void check_finite() { move(1, 1, &Tensors::source, &Tensors::nowhere, inputs()); }
  void scale(double factor, int divisor) {
    move(factor, divisor, &Tensors::result, &Tensors::result, results());
  }

  // Queues copies of results to their destinations.
  void deliver() {
    for (const One& one : all_) {
      if (one.copy.data() == nullptr) continue;
      device_.copy(one.tensor->out, one.copy.data(), one.tensor->count * element_);
    }
  }
  // Queues a copy of the flags; call record_flags() when it is done.
  void fetch_flags() {
    if (flags_.data() == nullptr) return;
    noted_ = device_.take_pinned(flags_.size_bytes());
    device_.copy(noted_.get(), flags_.data(), flags_.size_bytes());
  }
  void record_flags() const {
    if (!noted_) return;
    const auto* const flags = reinterpret_cast<const uint32_t*>(noted_.get());
    for (size_t r = 0; r < runs_.size(); ++r) {
      ReduceTensor& tensor = *all_[runs_[r].tensor].tensor;
      tensor.input_finite &= flags[r] == 0;
      tensor.result_finite &= flags[runs_.size() + r] == 0;
    }
  }

 private:
  struct One {
    ReduceTensor* tensor;
    const void* in;
    void* out;
    DeviceMemory copy;
  };
  // Elements of a tensor, and their position in the packed memory.
  struct Run {
    size_t tensor, begin, count, at;
  };
  using Address = const void* (Tensors::*)(const Run&) const;

  void add(ReduceTensor& tensor) {
    One one{&tensor, tensor.in, tensor.out, {}};
    if (tensor.place != &device_ && tensor.count > 0) {
      one.copy = DeviceMemory(device_, tensor.count * element_);
      device_.copy(one.copy.data(), tensor.in, tensor.count * element_);
      one.in = one.out = one.copy.data();
    }
    all_.push_back(std::move(one));
  }

  const void* source(const Run& run) const {
    return static_cast<const char*>(all_[run.tensor].in) + run.begin * element_;
  }
  const void* result(const Run& run) const {
    return static_cast<const char*>(all_[run.tensor].out) + run.begin * element_;
  }
  const void* place_in_packed(const Run& run) const { return packed_.data() + run.at * element_; }
  const void* nowhere(const Run&) const { return nullptr; }

  uint32_t* inputs() {
    if (!tracks_finite_) return nullptr;
    if (flags_.data() == nullptr) {
      flags_ = DeviceMemory(device_, 2 * runs_.size() * sizeof(uint32_t));
      device_.clear(flags_.data(), flags_.size_bytes());
    }
    return reinterpret_cast<uint32_t*>(flags_.data());
  }
  uint32_t* results() { return tracks_finite_ ? inputs() + runs_.size() : nullptr; }

  void move(double factor, int divisor, Address from, Address to, uint32_t* nonfinite) {
    std::vector<Span> spans;
    for (const Run& run : runs_) {
      spans.push_back(span((this->*from)(run), (this->*to)(run), run.count));
    }
    gpu::scale(device_, std::move(spans), dtype_, factor, divisor, nonfinite);
  }

  Device& device_;
  const DType dtype_;
  const size_t element_;
  std::vector<One> all_;
  std::vector<Run> runs_;
  size_t count_ = 0, section_ = 0;
  DeviceMemory packed_, flags_;
  bool tracks_finite_ = false;
  Device::PinnedMemory noted_;
};

void Nccl::allreduce(std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                     bool check_finite) {
  const Device::Use here(device_);
  Tensors all(device_, tensors, args.dtype);
  if (all.count() == 0) return;
  check_finite = check_finite && facts(args.dtype).floating;
  if (check_finite) all.track_finite();
  const int divisor = args.op == ReduceOp::kAverage ? size_ : 1;
  const auto reduce = [&](const void* from, void* to) {
    await_call(calls_->allreduce(from, to, all.count(), type_of(args.dtype), op_of(args.op),
                                 communicator_, device_.stream()));
  };
  if (all.in() != nullptr && args.prescale == 1) {
    if (check_finite) all.check_finite();
    reduce(all.in(), all.out());
    if (check_finite || args.postscale != 1 || divisor != 1) all.scale(args.postscale, divisor);
  } else {
    all.pack(args.prescale);
    reduce(all.packed(), all.packed());
    all.unpack(args.postscale, divisor);
  }
  all.fetch_flags();
  finish([&] { all.deliver(); });
  all.record_flags();
  count(all.count() * facts(args.dtype).size, 2);
}

// Either all ranks of the node own a shard, or one owns everything.
class Nccl::Halves : public NodeHalves {
 public:
  Halves(Nccl& nccl, std::vector<ReduceTensor>& tensors, const ReduceArgs& args, int owners)
      : nccl_(nccl),
        tensors_(tensors),
        args_(args),
        type_(type_of(args.dtype)),
        shared_(owners == nccl.size_),
        all_(nccl.device_, tensors, args.dtype) {
    all_.track_finite();
    all_.cut(owners);
  }

  void reduce() override {
    const Device::Use here(nccl_.device_);
    all_.pack(args_.prescale);
    if (all_.count() == 0) return;
    const NcclCalls& calls = *nccl_.calls_;
    void* const stream = nccl_.device_.stream();
    const int op = op_of(args_.op);
    nccl_.await_call(shared_ ? calls.reduce_scatter(all_.packed(), own(), all_.section(), type_, op,
                                                    nccl_.communicator_, stream)
                             : calls.allreduce(all_.packed(), all_.packed(), all_.count(), type_,
                                               op, nccl_.communicator_, stream));
    if (shared_ || nccl_.rank_ == 0) mine_ = all_.shards(shared_ ? nccl_.rank_ : 0);
  }

  std::vector<ReduceTensor>& mine() override { return mine_; }

  void share() override {
    const Device::Use here(nccl_.device_);
    if (all_.count() > 0) {
      const NcclCalls& calls = *nccl_.calls_;
      void* const stream = nccl_.device_.stream();
      nccl_.await_call(shared_ ? calls.allgather(own(), all_.packed(), all_.section(), type_,
                                                 nccl_.communicator_, stream)
                               : calls.broadcast(all_.packed(), all_.packed(), all_.count(), type_,
                                                 0, nccl_.communicator_, stream));
    }
    all_.unpack(1, 1);
    all_.fetch_flags();
    nccl_.finish([&] { all_.deliver(); });
    all_.record_flags();
    nccl_.count(all_.count() * facts(args_.dtype).size, 2);
    for (size_t t = 0; t < mine_.size(); ++t) note_shard(mine_[t], tensors_[t]);
  }

 private:
  uint8_t* own() const {
    const size_t section_bytes = all_.section() * facts(args_.dtype).size;
    return all_.packed() + static_cast<size_t>(nccl_.rank_) * section_bytes;
  }

  Nccl& nccl_;
  std::vector<ReduceTensor>& tensors_;
  const ReduceArgs args_;
  const int type_;
  const bool shared_;
  Tensors all_;
  std::vector<ReduceTensor> mine_;
};

std::unique_ptr<NodeHalves> Nccl::cut(std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                                      int owners) {
  const Device::Use here(device_);
  return std::make_unique<Halves>(*this, tensors, args, owners);
}

void Nccl::broadcast(void* data, size_t size_bytes, int root, const Place* place) {
  if (size_bytes == 0) return;
  const Device::Use here(device_);
  Local local(device_, data, size_bytes, place);
  local.fetch();
  await_call(calls_->broadcast(local.data(), local.data(), size_bytes, kInt8, root, communicator_,
                               device_.stream()));
  finish([&] { local.deliver(); });
  count(size_bytes, 1);
}

void Nccl::allgather(const void* in, void* out, const std::vector<size_t>& sizes,
                     const Place* place) {
  const size_t total = sum(sizes), own = sizes[static_cast<size_t>(rank_)];
  if (total == 0) return;
  const Device::Use here(device_);
  Local source(device_, in, own, place), target(device_, out, total, place);
  source.fetch();
  Stream const stream = device_.stream();
  const bool equal = std::all_of(sizes.begin(), sizes.end(), [&](size_t n) { return n == own; });
  if (equal) {
    await_call(calls_->allgather(source.data(), target.data(), own, kInt8, communicator_, stream));
  } else {
    grouped([&](const Call& call) {
      uint8_t* to = target.data();
      for (int r = 0; r < size_; ++r) {
        const size_t its = sizes[static_cast<size_t>(r)];
        const uint8_t* const from = r == rank_ ? source.data() : to;
        if (its > 0) call(calls_->broadcast(from, to, its, kInt8, r, communicator_, stream));
        to += its;
      }
    });
  }
  finish([&] { target.deliver(); });
  count(total, 1);
}

void Nccl::alltoall(const void* in, const std::vector<size_t>& given, void* out,
                    const std::vector<size_t>& received, const Place* place) {
  const Device::Use here(device_);
  const size_t total = sum(given), kept = given[static_cast<size_t>(rank_)];
  Local source(device_, in, total, place), target(device_, out, sum(received), place);
  source.fetch();
  grouped([&](const Call& call) {
    const uint8_t* from = source.data();
    uint8_t* to = target.data();
    for (int r = 0; r < size_; ++r) {
      const size_t gives = given[static_cast<size_t>(r)], gets = received[static_cast<size_t>(r)];
      if (r == rank_) {
        device_.copy(to, from, gives);
      } else {
        Stream const stream = device_.stream();
        if (gives > 0) call(calls_->send(from, gives, kInt8, r, communicator_, stream));
        if (gets > 0) call(calls_->receive(to, gets, kInt8, r, communicator_, stream));
      }
      from += gives;
      to += gets;
    }
  });
  finish([&] { target.deliver(); });
  count_(total - kept);
}

// NCCL's parts have one size, so uneven ones are padded.
void Nccl::reducescatter(const void* in, void* out, const std::vector<size_t>& counts,
                         const ReduceArgs& args, const Place* place) {
  const size_t element = facts(args.dtype).size;
  const size_t total = sum(counts), own = counts[static_cast<size_t>(rank_)];
  if (total == 0) return;
  const Device::Use here(device_);
  Local source(device_, in, total * element, place), target(device_, out, own * element, place);
  source.fetch();
  const size_t part = *std::max_element(counts.begin(), counts.end()), parts = counts.size();
  const bool packs = total != part * parts || args.prescale != 1;
  DeviceMemory packed, result;
  if (packs) {
    packed = DeviceMemory(device_, parts * part * element);
    result = DeviceMemory(device_, part * element);
    device_.clear(packed.data(), packed.size_bytes());
    std::vector<Span> spans;
    const uint8_t* from = source.data();
    for (size_t r = 0; r < parts; ++r) {
      spans.push_back(span(from, packed.data() + r * part * element, counts[r]));
      from += counts[r] * element;
    }
    scale(device_, std::move(spans), args.dtype, args.prescale, 1, nullptr);
  }
  uint8_t* const sums = packs ? result.data() : target.data();
  await_call(calls_->reduce_scatter(packs ? packed.data() : source.data(), sums, part,
                                    type_of(args.dtype), op_of(args.op), communicator_,
                                    device_.stream()));
  const int divisor = args.op == ReduceOp::kAverage ? size_ : 1;
  if (packs || args.postscale != 1 || divisor != 1) {
    scale(device_, {span(sums, target.data(), own)}, args.dtype, args.postscale, divisor, nullptr);
  }
  finish([&] { target.deliver(); });
  count(total * element, 1);
}

}  // namespace qsgd::gpu
