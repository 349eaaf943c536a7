// Drives codec, collectives and engine on thread ranks under a sanitizer; prints "ok" at the end.
#include "stress.h"

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "collectives/allreduce.h"
#include "collectives/exchange.h"
#include "collectives/reducescatter.h"
#include "common/error.h"
#include "common/workers.h"
#include "quant/wire.h"
#include "transport/thread_transport.h"

using namespace qsgd;

namespace {

CodecSpec rotated() {
  CodecSpec spec;
  spec.scheme = Scheme::kEden;
  spec.bits = 8;
  return spec;
}

// Every algorithm, on small and large tensors, alone and fused, through every kind of node.
void reduce_directly(const std::shared_ptr<ThreadWorld>& world, int rank, int ranks_per_node) {
  ThreadTransport transport(world, rank);
  const std::unique_ptr<SharedNode> node = make_thread_node(*world, transport, ranks_per_node);
  Communicator communicator{transport, node.get(), nullptr};
  const auto total = static_cast<float>(world->size() * (world->size() + 1) / 2);
  for (const auto algorithm :
       {Algorithm::kAuto, Algorithm::kDirect, Algorithm::kRing, Algorithm::kRecursiveDoubling,
        Algorithm::kRabenseifner, Algorithm::kHierarchical, Algorithm::kHierarchicalSra}) {
    std::vector<std::optional<CodecSpec>> codings{std::nullopt};
    if (is_compressed(algorithm)) codings = {CodecSpec{}, rotated()};
    for (const size_t count : {size_t{0}, size_t{7}, size_t{300'001}}) {
      for (const std::optional<CodecSpec>& coding : codings) {
        std::vector<float> a(count, static_cast<float>(rank + 1)), b = a;
        std::vector<ReduceTensor> tensors{{a.data(), a.data(), count, 1, 0}};
        if (count < 100) tensors.push_back({b.data(), b.data(), count, 2, 0});
        allreduce(communicator, tensors, {}, coding, algorithm, 0);
        for (const float x : a) require(std::fabs(x - total) < 0.9f, name_of(algorithm));
      }
    }
  }
}

void move_directly(const std::shared_ptr<ThreadWorld>& world, int rank) {
  ThreadTransport transport(world, rank);
  const auto size = static_cast<size_t>(world->size());
  std::vector<int32_t> word(200'000, rank), all(size), part(1), ones(size, 1);
  broadcast(transport, word.data(), word.size() * sizeof(int32_t), world->size() - 1);
  require(word.back() == world->size() - 1, "large broadcast");
  const std::vector<size_t> sizes(size, sizeof(int32_t)), counts(size, 1);
  allgatherv(transport, &rank, all.data(), sizes);
  require(all.back() == world->size() - 1, "allgatherv");
  std::vector<int32_t> swapped(size);
  alltoallv(transport, all.data(), sizes, swapped.data(), sizes);
  require(swapped.front() == rank, "alltoallv");
  reducescatter(transport, ones.data(), part.data(), counts, {DType::kInt32});
  require(part.front() == world->size(), "reducescatter");
  barrier(transport);
}

void drive_collectives(int size, int ranks_per_node) {
  const auto world = std::make_shared<ThreadWorld>(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      reduce_directly(world, rank, ranks_per_node);
      move_directly(world, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void fuzz_decoder(const CodecSpec& spec) {
  std::mt19937 random(1);
  const size_t count = 1000;
  const size_t size = sizeof(WireHeader) + spec.bytes(count);
  for (int i = 0; i < 2000; ++i) {
    std::vector<uint8_t> message(random() % (size + 40));
    for (uint8_t& byte : message) byte = static_cast<uint8_t>(random());
    if (message.size() == size && i % 2) seal(message.data(), size, spec, count);
    try {
      verify(message.data(), message.size(), spec, count, 0);
    } catch (const Error&) {
      continue;
    }
    std::vector<float> out(512);
    const float scale = 1.0f;
    decode(&scale, message.data() + sizeof(WireHeader), 512, spec, out.data(), DType::kFloat32);
  }
}

void drive_workers() {
  for (int threads = 1; threads <= 4; ++threads) {
    Workers workers(threads);
    for (size_t tasks = 0; tasks < 40; ++tasks) {
      std::vector<int> calls(tasks, 0);  // plain ints: a task run twice, or late, is a race
      workers.run(tasks, [&](size_t i) { ++calls[i]; });
      for (const int n : calls) require(n == 1, "every task runs once before run() returns");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 2 || argc == 3, "usage: stress FOLDER [KERNELS]");
  if (argc == 3) {
    drive_engines(argv[1], argv[2]);
    std::puts("ok");
    return 0;
  }
  drive_workers();
  fuzz_decoder(CodecSpec{});
  fuzz_decoder(rotated());
  drive_engines(argv[1], "");
  for (const int size : {1, 2, 3, 5}) {
    for (const int ranks_per_node : {1, 2, size}) drive_collectives(size, ranks_per_node);
  }
  std::puts("ok");
}
