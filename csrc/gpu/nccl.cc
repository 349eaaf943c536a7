#include "gpu/nccl.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "collectives/allgather.h"
#include "collectives/broadcast.h"
#include "collectives/node_shards.h"
#include "common/error.h"
#include "common/kept.h"

namespace qsgd::gpu {
namespace {

// Declarations of nccl.h, version 2.14 and later.
constexpr int kSuccess = 0, kInProgress = 7;
constexpr size_t kIdBytes = 128;
constexpr int kInt8 = 0;

// NCCL's type; empty: not supported, reduced on the host.
std::optional<int> type_of(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return kInt8;
    case DType::kUint8:
      return 1;
    case DType::kInt32:
      return 2;
    case DType::kInt64:
      return 4;
    case DType::kFloat16:
      return 6;
    case DType::kFloat32:
      return 7;
    case DType::kFloat64:
      return 8;
    case DType::kBFloat16:
      return 9;
    default:
      return std::nullopt;
  }
}

std::optional<int> op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return 0;
    case ReduceOp::kProduct:
      return 1;
    case ReduceOp::kMax:
      return 2;
    case ReduceOp::kMin:
      return 3;
    default:
      return std::nullopt;
  }
}

using Clock = std::chrono::steady_clock;
// Timeouts for ranks that do not join, and for ranks that do not close.
constexpr std::chrono::seconds kJoining{120}, kClosing{10};

}  // namespace

struct NcclCalls {
  struct Id {
    char bytes[kIdBytes];
  };
  struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21400;  // of these fields
    int blocking = 0;
  };

  using Result = int;
  Result (*get_id)(Id*);
  Result (*init)(void**, int, Id, int, Config*);
  Result (*state)(void*, Result*);
  Result (*finalize)(void*);
  Result (*destroy)(void*);
  Result (*abort)(void*);
  Result (*allreduce)(const void*, void*, size_t, int, int, void*, Stream);
  Result (*broadcast)(const void*, void*, size_t, int, int, void*, Stream);
  Result (*reduce_scatter)(const void*, void*, size_t, int, int, void*, Stream);
  Result (*allgather)(const void*, void*, size_t, int, void*, Stream);
  Result (*send)(const void*, size_t, int, int, void*, Stream);
  Result (*receive)(void*, size_t, int, int, void*, Stream);
  Result (*begin_group)();
  Result (*end_group)();
  const char* (*text)(Result);
  const char* (*last_error)(void*);

  std::string describe(Result result, void* communicator) const {
    std::string said = text(result);
    const char* const more = last_error(communicator);
    if (more != nullptr && *more != '\0') said += std::string(": ") + more;
    return said;
  }
};

namespace {

// The library is never unloaded, because it may have threads.
std::shared_ptr<const NcclCalls> load(const std::string& path, std::string& why) {
  void* const file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    why = dlerror();
    return nullptr;
  }
  auto calls = std::make_shared<NcclCalls>();
  const auto find = [&](const char* name, auto& call) {
    call = reinterpret_cast<std::decay_t<decltype(call)>>(dlsym(file, name));
    if (call == nullptr) why = path + " has no " + name + "; NCCL 2.14 or later is needed";
  };
  find("ncclGetUniqueId", calls->get_id);
  find("ncclCommInitRankConfig", calls->init);
  find("ncclCommGetAsyncError", calls->state);
  find("ncclCommFinalize", calls->finalize);
  find("ncclCommDestroy", calls->destroy);
  find("ncclCommAbort", calls->abort);
  find("ncclAllReduce", calls->allreduce);
  find("ncclBroadcast", calls->broadcast);
  find("ncclReduceScatter", calls->reduce_scatter);
  find("ncclAllGather", calls->allgather);
  find("ncclSend", calls->send);
  find("ncclRecv", calls->receive);
  find("ncclGroupStart", calls->begin_group);
  find("ncclGroupEnd", calls->end_group);
  find("ncclGetErrorString", calls->text);
  find("ncclGetLastError", calls->last_error);
  return why.empty() ? calls : nullptr;
}

// Information that ranks exchange before they begin.
struct Vote {
  char against[200] = {};  // why this rank cannot; empty: it can
  char host[64] = {};      // as NCCL distinguishes hosts: by name and boot, or NCCL_HOSTID
  char boot[40] = {};
  char device[kIdentity] = {};

  void refuse(const std::string& why) { std::snprintf(against, sizeof against, "%s", why.c_str()); }
};

Vote vote_of(const NcclCalls* calls, const Device* device, const std::string& why) {
  Vote vote;
  if (const char* const given = std::getenv("NCCL_HOSTID")) {
    std::snprintf(vote.host, sizeof vote.host, "%s", given);
  } else {
    gethostname(vote.host, sizeof vote.host - 1);
    std::ifstream("/proc/sys/kernel/random/boot_id").getline(vote.boot, sizeof vote.boot);
  }
  if (calls == nullptr) {
    vote.refuse(why);
  } else if (device == nullptr) {
    vote.refuse("it has had no tensor in a GPU's memory");
  } else {
    device->identify(vote.device);
  }
  return vote;
}

// Empty if all ranks can; else which one cannot, and why: equal on all ranks.
std::string objection(Transport& transport, const std::vector<int>& ranks, const Vote& own) {
  const auto size = static_cast<size_t>(transport.size());
  const KeptOnFailure<std::vector<Vote>> votes{std::vector<Vote>(size)};
  allgatherv(transport, &own, votes->data(), std::vector<size_t>(size, sizeof(Vote)));
  std::map<std::string, int> owners;
  for (size_t r = 0; r < size; ++r) {
    const Vote& vote = (*votes)[r];
    const std::string rank = "rank " + std::to_string(ranks[r]);
    if (vote.against[0] != '\0') return rank + ": " + vote.against;
    const std::string device = std::string(vote.device) + " of host " + vote.host;
    const auto [other, fresh] = owners.try_emplace(device + vote.boot, ranks[r]);
    if (fresh) continue;
    return rank + " shares GPU " + device + " with rank " + std::to_string(other->second) +
           ", and NCCL needs one for each rank";
  }
  return {};
}

}  // namespace

int nccl_version(const std::string& path) {
  void* const file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) return 0;
  auto* const version = reinterpret_cast<int (*)(int*)>(dlsym(file, "ncclGetVersion"));
  int number = 0;
  return version != nullptr && version(&number) == kSuccess ? number : 0;
}

std::unique_ptr<Nccl> Nccl::make(Transport& transport, const std::vector<int>& ranks,
                                 const std::string& path, Device* device, Count count,
                                 const std::function<void(const std::string&)>& log) {
  if (path.empty()) return nullptr;  // on every rank, because it is a setting
  const auto refuse = [&](const std::string& why) {
    if (transport.rank() == 0 && log) {
      log("NCCL does not carry tensors on GPUs: " + why + ". They go through the host's memory; " +
          "QSGD_NCCL=none hides this warning");
    }
    return nullptr;
  };
  std::string why;
  const std::shared_ptr<const NcclCalls> calls = load(path, why);
  Vote vote = vote_of(calls.get(), device, why);
  why = objection(transport, ranks, vote);
  if (!why.empty()) return refuse(why);

  const Device::Use here(*device);
  struct Start {
    NcclCalls::Id id;
    int result;
  };
  const KeptOnFailure<Start> start{Start{}};
  if (transport.rank() == 0) start->result = calls->get_id(&start->id);
  qsgd::broadcast(transport, &*start, sizeof(Start), 0);
  if (start->result != kSuccess) return refuse(calls->describe(start->result, nullptr));
  std::unique_ptr<Nccl> made(new Nccl(calls, *device, transport, std::move(count)));
  vote.refuse(made->join(std::string(start->id.bytes, kIdBytes)));
  why = objection(transport, ranks, vote);
  if (!why.empty()) return refuse(why);
  return made;
}

Nccl::Nccl(std::shared_ptr<const NcclCalls> calls, Device& device, Transport& transport,
           Count count)
    : calls_(std::move(calls)),
      device_(device),
      abort_(transport.abort_flag()),
      count_(std::move(count)),
      rank_(transport.rank()),
      size_(transport.size()) {}

Nccl::~Nccl() {
  if (communicator_ == nullptr) return;
  const Device::Use here(device_);
  calls_->abort(communicator_);
}

// Non-blocking, so that the job can be aborted meanwhile.
std::string Nccl::join(const std::string& id) {
  NcclCalls::Id its;
  std::memcpy(its.bytes, id.data(), kIdBytes);
  NcclCalls::Config config;
  try {
    const int result = calls_->init(&communicator_, size_, its, rank_, &config);
    if (result != kSuccess && result != kInProgress) {
      communicator_ = nullptr;
      return calls_->describe(result, nullptr);
    }
    if (!done_within(kJoining)) return "the other ranks did not join NCCL's communicator";
  } catch (const Error& error) {
    abort_.check();
    return error.what();
  }
  return {};
}

void Nccl::close() {
  if (communicator_ == nullptr) return;
  const Device::Use here(device_);
  bool ended = false;
  try {
    const int result = calls_->finalize(communicator_);
    ended = (result == kSuccess || result == kInProgress) && done_within(kClosing);
  } catch (const Error&) {
    ended = false;
  }
  ended ? calls_->destroy(communicator_) : calls_->abort(communicator_);
  communicator_ = nullptr;
}

bool Nccl::call_done() const {
  int state = kSuccess;
  const int result = calls_->state(communicator_, &state);
  if (result == kSuccess && state == kInProgress) return false;
  if (result == kSuccess && state == kSuccess) return true;
  fail(result != kSuccess ? result : state);
}

void Nccl::fail(int result) const {
  throw internal_error("NCCL: " + calls_->describe(result, communicator_) +
                       "; NCCL_DEBUG=WARN prints more, and QSGD_NCCL=none avoids NCCL");
}

void Nccl::await_call(int result) const {
  if (result != kSuccess && result != kInProgress) fail(result);
  while (!done_within(kJoining)) {  // no timeout: only the end of the job ends it
  }
}

void Nccl::grouped(const std::function<void(const Call& call)>& calls) const {
  int first = calls_->begin_group();
  calls([&](int result) {
    if (first == kSuccess || first == kInProgress) first = result;
  });
  const int ended = calls_->end_group();
  await_call(first == kSuccess || first == kInProgress ? ended : first);
}

bool Nccl::done_within(std::chrono::seconds patience) const {
  const auto until = Clock::now() + patience;
  Backoff backoff;
  while (!call_done()) {
    abort_.check();
    if (Clock::now() > until) return false;
    backoff.pause();
  }
  return true;
}

void Nccl::finish(const std::function<void()>& deliver) {
  constexpr std::chrono::milliseconds kLook{2};  // interval for checking NCCL's asynchronous errors
  const auto mark = device_.mark(device_.stream());
  auto next = Clock::now() + kLook;
  Backoff backoff;
  while (!mark->passed()) {
    abort_.check();
    if (Clock::now() > next) {
      call_done();
      next = Clock::now() + kLook;
    }
    backoff.pause();
  }
  deliver();
  device_.synchronize();
}

void Nccl::count(size_t size_bytes, int rounds) const {
  const auto others = static_cast<size_t>(rounds * (size_ - 1));
  count_(size_bytes * others / static_cast<size_t>(size_));
}

bool Nccl::reduces(const ReduceArgs& args) {
  const bool extreme = args.op == ReduceOp::kMin || args.op == ReduceOp::kMax;
  return type_of(args.dtype) && op_of(args.op) && !(extreme && facts(args.dtype).floating);
}

namespace {

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
    await_call(calls_->allreduce(from, to, all.count(), *type_of(args.dtype), *op_of(args.op),
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
        type_(*type_of(args.dtype)),
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
    const int op = *op_of(args_.op);
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
                                    *type_of(args.dtype), *op_of(args.op), communicator_,
                                    device_.stream()));
  const int divisor = args.op == ReduceOp::kAverage ? size_ : 1;
  if (packs || args.postscale != 1 || divisor != 1) {
    scale(device_, {span(sums, target.data(), own)}, args.dtype, args.postscale, divisor, nullptr);
  }
  finish([&] { target.deliver(); });
  count(total * element, 1);
}

}  // namespace qsgd::gpu
