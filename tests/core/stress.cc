// Drives codec, collectives and engine on thread ranks under a sanitizer; prints "ok" at the end.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "quant/wire.h"
#include "transport/thread_transport.h"

using namespace qsgd;

namespace {

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

Submission make(const std::string& name, size_t count, int round) {
  Submission s;
  s.name = name;
  s.shape = {static_cast<int64_t>(count)};
  s.args.op = ReduceOp::kAverage;
  s.check_finite = true;
  s.quantised = round % 2 == 0;
  s.spec.bits = 2 << (round / 2 % 3);
  s.spec.norm = round % 4 == 0 ? Norm::kMax : Norm::kL2;
  s.spec.bucket = 64;
  return s;
}

void run_rank(const std::shared_ptr<ThreadWorld>& world, int rank, int rounds) {
  Engine engine(std::make_unique<ThreadTransport>(world, rank), world->abort_flag(),
                EngineConfig{});
  std::mt19937 order(static_cast<unsigned>(rank));
  const std::vector<size_t> counts = {0, 1, 63, 64, 65, 1000, 10000};
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::vector<float>> tensors;
    std::vector<size_t> turns;
    for (size_t i = 0; i < counts.size(); ++i) {
      tensors.emplace_back(counts[i], static_cast<float>(rank + 1));
      turns.push_back(i);
    }
    std::shuffle(turns.begin(), turns.end(), order);
    std::vector<std::shared_ptr<Handle>> handles;
    for (const size_t i : turns) {
      float* const data = tensors[i].data();
      handles.push_back(engine.submit(make("t" + std::to_string(i), counts[i], round), data, data));
    }
    for (const auto& handle : handles) {
      while (!handle->wait_for(std::chrono::milliseconds(100))) {
      }
      handle->check();
    }
    const float mean = static_cast<float>(engine.size() + 1) / 2;
    for (const auto& tensor : tensors) {
      // Quantised means scatter; the bound is a few levels of the coarsest code.
      for (const float x : tensor) {
        require(std::isfinite(x) && std::fabs(x - mean) < 60 * mean, "mean far off");
      }
    }
    std::vector<int32_t> word(33, rank);
    Submission b = make("b", word.size(), 1);
    b.kind = OpKind::kBroadcast;
    b.args.dtype = DType::kInt32;
    b.root = round % engine.size();
    const auto handle = engine.submit(b, word.data(), word.data());
    while (!handle->wait_for(std::chrono::milliseconds(100))) {
    }
    handle->check();
    require(word.back() == b.root, "broadcast");
  }
  if (engine.size() > 1) {  // one of several fused tensors holds NaN; it fails, the others do not
    std::vector<std::vector<float>> tensors(3, std::vector<float>(700, 1.0f));
    if (rank == 1) tensors[1][300] = NAN;
    std::vector<std::shared_ptr<Handle>> handles;
    for (size_t i = 0; i < tensors.size(); ++i) {
      float* const data = tensors[i].data();
      handles.push_back(engine.submit(make("n" + std::to_string(i), 700, 1), data, data));
    }
    for (size_t i = 0; i < handles.size(); ++i) {
      while (!handles[i]->wait_for(std::chrono::milliseconds(100))) {
      }
      bool failed = false;
      try {
        handles[i]->check();
      } catch (const Error& error) {
        failed = error.kind() == ErrorKind::kNonFinite;
      }
      require(failed == (i == 1), "only the tensor with NaN fails");
    }
  }
  if (rank == 1) {  // leaves something that the others lack; it must fail, not hang
    std::vector<float> lonely(5, 1.0f);
    const auto handle = engine.submit(make("lonely", 5, 0), lonely.data(), lonely.data());
    engine.shutdown("the stress ended", 60);
    bool failed = false;
    try {
      handle->check();
    } catch (const Error&) {
      failed = true;
    }
    require(handle->done() && failed, "a lonely tensor fails at shutdown");
  } else {
    engine.shutdown("the stress ended", 60);
  }
}

void fuzz_decoder() {
  std::mt19937 random(1);
  const QuantSpec spec;
  const size_t count = 1000;
  const size_t size = sizeof(WireHeader) + spec.buckets(count) * 4 + spec.code_bytes(count);
  for (int i = 0; i < 2000; ++i) {
    std::vector<uint8_t> message(random() % (size + 40));
    for (uint8_t& byte : message) byte = static_cast<uint8_t>(random());
    if (message.size() == size && i % 2) seal(message.data(), size, spec, 1, count);
    try {
      verify(message.data(), message.size(), spec, 1, count, 0);
    } catch (const Error&) {
      continue;
    }
    std::vector<float> out(512);
    decode_bucket(1.0f, message.data() + sizeof(WireHeader), 512, spec, out.data());
  }
}

}  // namespace

int main() {
  fuzz_decoder();
  for (int size = 1; size <= 5; ++size) {
    const auto world = std::make_shared<ThreadWorld>(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] { run_rank(world, rank, 12); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  std::puts("ok");
}
