// Runs CUDA kernels on one thread of the CPU, for tests: every thread of a block is a coroutine,
// which goes on until it waits for other lanes. So the kernels that are tested are the very ones
// that nvcc compiles, with their indices, their exchanges between lanes and their shared memory.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "nccl_on_cpu.h"
#include "streams_on_cpu.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __shared__ static  // blocks run one after the other
#define __launch_bounds__(...)

struct Dim3 {
  unsigned x;
};
inline Dim3 threadIdx, blockIdx, blockDim;

namespace gpu_twin {

// The threads of the block that runs.
class Block {
 public:
  Block(unsigned threads, const std::function<void()>& kernel) : kernel_(kernel) {
    fibers_.resize(threads);
    for (Fiber& fiber : fibers_) {
      fiber.stack.reset(new char[kStack]);  // not set to zero: there are a thousand of them
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, enter, 0);
    }
  }

  void run() {
    running() = this;
    for (size_t left = fibers_.size(); left > 0;) {
      advanced_ = false;
      for (current_ = 0; current_ < fibers_.size(); ++current_) {
        Fiber& fiber = fibers_[current_];
        if (fiber.ended) continue;
        threadIdx.x = static_cast<unsigned>(current_);
        swapcontext(&scheduler_, &fiber.context);
        if (fiber.ended) --left;
        advanced_ |= fiber.ended;
      }
      if (!advanced_) {
        std::fprintf(stderr, "a kernel hangs: its threads wait for different things\n");
        std::abort();
      }
    }
  }

  static Block*& running() {
    static Block* block = nullptr;
    return block;
  }

  enum Scope { kWarp, kBlock };

  // Waits until all threads of the scope that have not ended have come here as often as this one.
  void meet(Scope scope) {
    const size_t me = current_;
    const size_t begin = scope == kWarp ? me / 32 * 32 : 0;
    const size_t end = scope == kWarp ? std::min(begin + 32, fibers_.size()) : fibers_.size();
    const size_t turn = ++fibers_[me].meetings[scope];
    advanced_ = true;
    for (;;) {
      bool all = true;
      for (size_t i = begin; i < end; ++i) {
        all &= fibers_[i].ended || fibers_[i].meetings[scope] >= turn;
      }
      if (all) break;
      swapcontext(&fibers_[me].context, &scheduler_);
    }
    advanced_ = true;
  }

  // The value that lane `from(lane)` of the warp gives; its own where that is beyond the warp.
  template <class T, class From>
  T exchange(T value, const From& from) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    const size_t me = current_, warp = me / 32 * 32, lane = me % 32;
    // A lane that is early for the next exchange must not overwrite what others have yet to read.
    const size_t side = fibers_[me].exchanges++ % 2;
    std::memcpy(&fibers_[me].given[side], &value, sizeof value);
    meet(kWarp);
    const size_t other = from(lane);
    if (other < 32 && warp + other < fibers_.size()) {
      std::memcpy(&value, &fibers_[warp + other].given[side], sizeof value);
    }
    return value;
  }

 private:
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool ended = false;
    size_t meetings[2] = {};  // by Scope
    size_t exchanges = 0;
    uint64_t given[2] = {};
  };
  static constexpr size_t kStack = size_t{1} << 16;

  static void enter() {
    Block& block = *running();
    block.kernel_();
    block.fibers_[block.current_].ended = true;
  }

  const std::function<void()>& kernel_;
  std::vector<Fiber> fibers_;
  ucontext_t scheduler_;
  size_t current_ = 0;
  bool advanced_ = false;  // somebody did, since all were asked last
};

// One kernel at a time: what it shares and its indices are static.
inline void run(size_t blocks, unsigned threads, const std::function<void()>& kernel) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  blockDim.x = threads;
  for (size_t i = 0; i < blocks; ++i) {
    blockIdx.x = static_cast<unsigned>(i);
    Block(threads, kernel).run();
  }
}

}  // namespace gpu_twin

inline void __syncthreads() { gpu_twin::Block::running()->meet(gpu_twin::Block::kBlock); }
inline int __float2int_rn(float x) { return static_cast<int>(std::lrint(x)); }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int byte = 0; byte < 4; ++byte) {
    const uint32_t from = selector >> (4 * byte) & 7u;
    result |= static_cast<uint32_t>(both >> (8 * from) & 0xffu) << (8 * byte);
  }
  return result;
}
inline void atomicOr(uint32_t* to, uint32_t bits) { *to |= bits; }
inline void atomicAdd(double* to, double by) { *to += by; }

namespace qsgd::gpu {

template <class T>
T lane_xor(T value, int mask) {
  return gpu_twin::Block::running()->exchange(
      value, [mask](size_t lane) { return lane ^ static_cast<size_t>(mask); });
}
template <class T>
T lane_down(T value, int by) {
  return gpu_twin::Block::running()->exchange(
      value, [by](size_t lane) { return lane + static_cast<size_t>(by); });
}
template <class T>
T lane_get(T value, int from) {
  return gpu_twin::Block::running()->exchange(value,
                                              [from](size_t) { return static_cast<size_t>(from); });
}
inline void sync_lanes() { gpu_twin::Block::running()->meet(gpu_twin::Block::kWarp); }

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), size_t blocks, unsigned threads, void* stream,
            const Arguments&... arguments) {
  gpu_twin::queue(static_cast<gpu_twin::Stream_t>(stream),
                  [=] { gpu_twin::run(blocks, threads, [&] { kernel(arguments...); }); });
}

}  // namespace qsgd::gpu
