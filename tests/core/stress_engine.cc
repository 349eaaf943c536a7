// The engine's part of the stress program: every kind of operation, groups, process sets, joins,
// tuning, and what goes wrong, while another thread looks on.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "stress.h"
#include "transport/thread_transport.h"

using namespace qsgd;

namespace {

using HandlePtr = std::shared_ptr<Handle>;

constexpr int kRounds = 12;
constexpr size_t kKeptSteps = 5;

std::shared_ptr<const Result> await(const HandlePtr& handle) {
  {
    const Waiting waiting(*handle);
    while (!handle->wait_for(std::chrono::milliseconds(100))) {
    }
  }
  handle->check();
  return handle->result();
}

ErrorKind ends_with(const HandlePtr& handle) {
  try {
    await(handle);
  } catch (const Error& error) {
    return error.kind();
  }
  return ErrorKind::kNone;
}

Operation make(OpKind kind, const std::string& name, Numbers shape) {
  Operation o;
  o.kind = kind;
  o.name = name;
  o.shape = std::move(shape);
  o.lasting = true;
  return o;
}

Operation make_sum(const std::string& name, size_t count) {
  return make(OpKind::kAllreduce, name, {static_cast<int64_t>(count)});
}

// Coded in every second round, in ways that change, and differ among tensors that are fused.
Operation make_mean(const std::string& name, size_t count, int round) {
  Operation o = make_sum(name, count);
  o.args.op = ReduceOp::kAverage;
  o.check_finite = true;
  if (round % 2 != 0) return o;
  CodecSpec spec;
  spec.bits = 2 << ((static_cast<size_t>(round) / 2 + count) % 3);
  spec.bucket = count % 2 == 0 ? 64 : 512;
  const bool feedback = round % 4 == 0;
  if ((static_cast<size_t>(round) / 2 + count) % 2 == 0) {
    spec.scheme = Scheme::kEden;
  } else {
    spec.norm = feedback ? Norm::kMax : Norm::kL2;
    spec.contract = feedback;
  }
  o.coding = Coding{spec, Choice::kNothing, feedback, /*nmse_budget=*/0.05};
  return o;
}

// Whether programs of this many ranks have two threads that reduce.
bool is_threaded(int size) { return size % 2 == 1; }

// One rank, which submits in an order of its own.
class Player {
  static Tuning tuning_of(int round) {
    Tuning tuning;
    tuning.fusion_bytes = round % 2 ? size_t{1} << 10 : size_t{64} << 20;
    tuning.cycle_time_s = 0.0;
    tuning.segment = SegmentSize(round % 2 ? 1024 : 0);
    return tuning;
  }

 public:
  Player(Engine& engine, bool has_device)
      : engine_(engine), has_device_(has_device), order_(static_cast<unsigned>(engine.rank())) {}

  void play(int round) {
    average_many(round);
    perform_many(round);
    reduce_group();
    combine_by_adasum();
    gather_rows(round);
    swap_rows(round);
    scatter_rows();
    broadcast_word(round);
    await(for_all(OpKind::kBarrier));
    if (size() > 1) use_set(round);
    join_one_by_one();
    if (rank() == 0) engine_.tune(tuning_of(round));
  }

  // One of several fused tensors holds NaN; it fails, the others do not.
  void meet_nan() {
    std::vector<std::vector<float>> tensors(3, std::vector<float>(700, 1.0f));
    if (rank() == size() - 1) tensors[1][300] = NAN;
    std::vector<HandlePtr> handles;
    for (size_t i = 0; i < tensors.size(); ++i) {
      handles.push_back(in_place(make_mean("nan" + std::to_string(i), 700, 1), tensors[i]));
    }
    require(ends_with(handles[1]) == ErrorKind::kNonFinite, "the tensor with NaN fails");
    await(handles[0]);
    await(handles[2]);
  }

  void leave() {
    if (rank() != 1) return engine_.shutdown("the stress ended", 60);
    std::vector<float> lonely(5, 1.0f);  // the others lack it; it must fail, not hang
    const HandlePtr handle = in_place(make_mean("lonely", 5, 0), lonely);
    engine_.shutdown("the stress ended", 60);
    require(ends_with(handle) != ErrorKind::kNone, "a lonely tensor fails at shutdown");
  }

 private:
  int rank() const { return engine_.rank(); }
  int size() const { return engine_.size(); }

  template <class T>
  HandlePtr in_place(Operation o, std::vector<T>& data) {
    return start(std::move(o), data.data(), data.data());
  }

  HandlePtr start(Operation o, const void* in, void* out, const Caller& caller = {}) {
    TensorMemory memory{in, out, nullptr};
    if (has_device_ && in != nullptr) memory.ready = engine_.mark(/*device=*/0, /*stream=*/nullptr);
    return engine_.start(std::make_shared<const Operation>(std::move(o)), memory, caller);
  }

  HandlePtr for_all(OpKind kind, Numbers ranks = {}) {
    Operation o = make(kind, "", {0});
    o.args.dtype = DType::kUint8;
    o.lasting = false;
    o.ranks = std::move(ranks);
    return start(std::move(o), nullptr, nullptr);
  }

  std::vector<size_t> shuffled(size_t count) {
    std::vector<size_t> turns(count);
    std::iota(turns.begin(), turns.end(), size_t{0});
    std::shuffle(turns.begin(), turns.end(), order_);
    return turns;
  }

  void average_many(int round) {
    const std::vector<size_t> counts = {0, 1, 63, 64, 65, 1000, 10000};
    std::vector<std::vector<float>> tensors;
    for (const size_t count : counts) tensors.emplace_back(count, static_cast<float>(rank() + 1));
    std::atomic<size_t> ended{0};
    std::vector<HandlePtr> handles;
    for (const size_t i : shuffled(counts.size())) {
      handles.push_back(
          in_place(make_mean("mean" + std::to_string(i), counts[i], round), tensors[i]));
      handles.back()->when_done([&ended] { ++ended; });
    }
    for (const HandlePtr& handle : handles) await(handle);
    while (ended < counts.size()) std::this_thread::yield();
    const float mean = static_cast<float>(size() + 1) / 2;
    for (const auto& tensor : tensors) {
      // Quantised means scatter; the bound is a few levels of the coarsest code.
      for (const float x : tensor) {
        require(std::isfinite(x) && std::fabs(x - mean) < 60 * mean, "mean far off");
      }
    }
  }

  // Threads of the program that do the engine's work, while its own has some too.
  void perform_many(int round) {
    std::vector<float> beside(5000, 1.0f);
    const HandlePtr background = in_place(make_sum("background", beside.size()), beside);
    std::thread other;
    if (is_threaded(size())) other = std::thread([&] { perform_some("other", round); });
    perform_some("own", round);
    if (other.joinable()) other.join();
    await(background);
    require(beside.back() == static_cast<float>(size()), "a sum in the background");
  }

  void perform_some(const std::string& name, int round) {
    for (int i = 0; i < 4; ++i) {
      std::vector<float> x(static_cast<size_t>(100 * i), static_cast<float>(round));
      Operation o = make_sum(name + std::to_string(i), x.size());
      await(start(std::move(o), x.data(), x.data(), {/*waits=*/true, [] { return false; }}));
      require(x.empty() || x.back() == static_cast<float>(round * size()), "a sum at once");
    }
  }

  void reduce_group() {
    std::vector<std::vector<float>> tensors(3, std::vector<float>(40, 1.0f));
    std::vector<HandlePtr> handles;
    for (const size_t i : shuffled(tensors.size())) {
      Operation o = make_sum("member" + std::to_string(i), 40);
      o.group = Group{"group", 3};
      handles.push_back(in_place(std::move(o), tensors[i]));
    }
    for (const HandlePtr& handle : handles) await(handle);
    for (const auto& tensor : tensors) {
      require(tensor.back() == static_cast<float>(size()), "sum of a group");
    }
  }

  void combine_by_adasum() {
    std::vector<float> same(50, 3.0f);  // of equal vectors the combination is any of them
    Operation o = make_sum("adasum", same.size());
    o.args.op = ReduceOp::kAdasum;
    await(in_place(std::move(o), same));
    require(std::fabs(same.back() - 3.0f) < 1e-4f, "adasum");
  }

  void gather_rows(int round) {
    const std::vector<int32_t> mine(static_cast<size_t>(2 * (rank() + round % 3)), rank());
    Operation o = make(OpKind::kAllgather, "rows", {static_cast<int64_t>(mine.size() / 2), 2});
    o.args.dtype = DType::kInt32;
    const auto result = await(start(std::move(o), mine.data(), nullptr));
    const int64_t rows = size() * (size() - 1) / 2 + size() * (round % 3);
    require(result->shape == std::vector<int64_t>{rows, 2}, "shape of an allgather");
    const auto* all = reinterpret_cast<const int32_t*>(result->data());
    if (rows > 0) require(all[2 * rows - 1] == size() - 1, "rows of an allgather");
  }

  // Row for row: i rows from everyone to rank i, each with the number of its sender.
  void swap_rows(int round) {
    std::vector<int64_t> splits(static_cast<size_t>(size()));
    std::iota(splits.begin(), splits.end(), round % 2);
    const int64_t rows = std::accumulate(splits.begin(), splits.end(), int64_t{0});
    const std::vector<double> mine(static_cast<size_t>(rows), rank());
    Operation o = make(OpKind::kAlltoall, "swap", {rows});
    o.args.dtype = DType::kFloat64;
    o.splits = splits;
    const auto result = await(start(std::move(o), mine.data(), nullptr));
    const int64_t from_each = rank() + round % 2;
    require(result->shape == std::vector<int64_t>{from_each * size()}, "shape of an alltoall");
    const auto* got = reinterpret_cast<const double*>(result->data());
    for (int64_t i = 0; i < from_each * size(); ++i) {
      require(got[i] == static_cast<double>(i / from_each), "rows of an alltoall");
    }
  }

  void scatter_rows() {
    const std::vector<int64_t> mine(15, rank());
    Operation o = make(OpKind::kReducescatter, "shares", {5, 3});
    o.args.dtype = DType::kInt64;
    const auto result = await(start(std::move(o), mine.data(), nullptr));
    const int64_t rows = 5 / size() + (rank() < 5 % size());
    require(result->shape == std::vector<int64_t>{rows, 3}, "shape of a reducescatter");
    const auto* got = reinterpret_cast<const int64_t*>(result->data());
    for (int64_t i = 0; i < 3 * rows; ++i) {
      require(got[i] == size() * (size() - 1) / 2, "sum of a reducescatter");
    }
  }

  void broadcast_word(int round) {
    std::vector<int32_t> word(33, rank());
    Operation o = make(OpKind::kBroadcast, "word", {33});
    o.args.dtype = DType::kInt32;
    o.root = round % size();
    const int root = o.root;
    await(in_place(std::move(o), word));
    require(word.back() == root, "broadcast");
  }

  // Even ranks, in a set that lives for a round, while all ranks reduce something else.
  void use_set(int round) {
    std::vector<int64_t> members;
    for (int64_t i = 0; i < size(); i += 2) members.push_back(i);
    const auto number = await(for_all(OpKind::kAddSet, members))->value;
    std::vector<float> whole(100, 1.0f), part(100, 1.0f);
    const HandlePtr everyone = in_place(make_mean("beside", 100, round), whole);
    if (rank() % 2 == 0) {
      Operation o = make_sum("within", 100);
      o.set = static_cast<int32_t>(number);
      await(in_place(std::move(o), part));
      require(part.back() == static_cast<float>(members.size()), "sum within a set");
    }
    await(everyone);
    await(for_all(OpKind::kRemoveSet, {number}));
  }

  // Rank r has r batches more than rank 0; who has joined counts as zeros.
  void join_one_by_one() {
    for (int batch = 0; batch <= rank(); ++batch) {
      std::vector<float> one(9, 1.0f);
      await(in_place(make_sum("batch" + std::to_string(batch), 9), one));
      require(one.back() == static_cast<float>(size() - batch), "sum with joined ranks");
    }
    require(await(for_all(OpKind::kJoin))->value == size() - 1, "the last to join");
  }

  Engine& engine_;
  const bool has_device_;
  std::mt19937 order_;
};

// `ranks_per_node`: 0 where they share no memory. `kernels`, and NCCL with them: of all ranks where
// they are even in number, else of the first two of each three; their tensors are a device's then.
void run_rank(const std::shared_ptr<ThreadWorld>& world, int rank, int ranks_per_node,
              const std::string& folder, const std::string& kernels) {
  EngineConfig config;
  // However short: ranks that only wait for what is on its way go on. A rank counts as waiting if
  // one of its threads waits, so the others need time to submit.
  config.agreement.deadlock_s = is_threaded(world->size()) ? 60 : 1e-6;
  config.kept_steps = kKeptSteps;
  config.gpu_library = world->size() % 2 == 0 || rank % 3 < 2 ? kernels : "";
  config.reducing.nccl_library = kernels;
  config.agreement.fan_out = world->size() % 3;  // 3: a star, 4: a chain, 5: something between
  if (world->size() == 3) config.agreement.cache_capacity = 4;  // names are learnt again
  auto transport = std::make_unique<ThreadTransport>(world, rank);
  auto node = ranks_per_node == 0 ? nullptr : make_thread_node(*world, *transport, ranks_per_node);
  Engine engine(std::move(transport), config, std::move(node));
  if (world->size() == 2) {
    engine.start_timeline(folder + "/timeline." + std::to_string(rank) + ".json", true,
                          Timeline::Clock::now());
  }
  std::atomic<bool> ended{false};
  std::thread onlooker([&] {
    while (!ended) {
      require(engine.aborted().empty(), "nobody gave up");
      const EngineStats stats = engine.stats();
      const StepProfile profile = engine.step_profile();
      require(stats.steps <= profile.steps, "steps only grow");
      require(profile.last.size() <= kKeptSteps, "few steps are kept");
      engine.quality();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  Player player(engine, !config.gpu_library.empty());
  for (int round = 0; round < kRounds; ++round) player.play(round);
  // A batch is reduced in every round by each rank, and none of the tensors more often.
  require(engine.stats().steps == kRounds, "a round is a step");
  player.meet_nan();
  engine.stop_timeline();
  ended = true;
  onlooker.join();
  player.leave();
}

}  // namespace

void drive_engines(const std::string& folder, const std::string& kernels) {
  for (int size = 1; size <= 5; ++size) {
    for (const int ranks_per_node : {0, 2, 5}) {
      const auto world = std::make_shared<ThreadWorld>(size);
      std::vector<std::thread> threads;
      for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] { run_rank(world, rank, ranks_per_node, folder, kernels); });
      }
      for (std::thread& thread : threads) thread.join();
    }
  }
}
