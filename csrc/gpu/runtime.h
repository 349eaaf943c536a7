// What the kernels need of CUDA, of HIP, or of the twin that runs them on the CPU in tests.
#pragma once

// The functions of CUDA and HIP have the same names, but for the beginning.
#if defined(QSGD_GPU_TWIN)
#include "cuda_on_cpu.h"
#define QSGD_GPU_API(name) gpu_twin::name
#define QSGD_GPU_NAME "twin"
#elif defined(__HIP__)
#include <hip/hip_runtime.h>
// The second number is of blocks, as CUDA counts; HIP would take it for wavefronts, and for their
// sake keep values in memory that registers have room for.
#undef __launch_bounds__
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define QSGD_GPU_API(name) hip##name
#define QSGD_GPU_NAME "HIP"
#else
#include <cuda_runtime.h>
#define QSGD_GPU_API(name) cuda##name
#define QSGD_GPU_NAME "CUDA"
#endif
#if !defined(QSGD_GPU_BUILT)  // for which GPUs, too
#define QSGD_GPU_BUILT QSGD_GPU_NAME
#endif

namespace qsgd::gpu {

// Lanes that work together. Half a wavefront where those have 64.
constexpr int kLanesShift = 5;
constexpr int kLanes = 1 << kLanesShift;

// The text of an error, or null. Clears the last error, so that no later launch is blamed for it.
inline const char* failure(QSGD_GPU_API(Error_t) error) {
  if (error == QSGD_GPU_API(Success)) return nullptr;
  static_cast<void>(QSGD_GPU_API(GetLastError)());
  return QSGD_GPU_API(GetErrorString)(error);
}
inline const char* last_error() { return failure(QSGD_GPU_API(GetLastError)()); }

inline const char* platform() { return QSGD_GPU_BUILT; }

#if defined(QSGD_GPU_TWIN)
#elif defined(__HIP__)
template <class T>
__device__ __forceinline__ T lane_xor(T value, int mask) {
  return __shfl_xor(value, mask, kLanes);
}
template <class T>
__device__ __forceinline__ T lane_down(T value, int by) {
  return __shfl_down(value, by, kLanes);
}
template <class T>
__device__ __forceinline__ T lane_get(T value, int lane) {
  return __shfl(value, lane, kLanes);
}
// A wavefront goes in step, and does what it asks of shared memory in that order. So this keeps the
// compiler from another order, and costs no instruction. Halves of a wavefront need not meet.
__device__ __forceinline__ void sync_lanes() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

#else
constexpr unsigned kAllLanes = 0xffffffffu;
template <class T>
__device__ __forceinline__ T lane_xor(T value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}
template <class T>
__device__ __forceinline__ T lane_down(T value, int by) {
  return __shfl_down_sync(kAllLanes, value, by);
}
template <class T>
__device__ __forceinline__ T lane_get(T value, int lane) {
  return __shfl_sync(kAllLanes, value, lane);
}
__device__ __forceinline__ void sync_lanes() { __syncwarp(); }
#endif

#if !defined(QSGD_GPU_TWIN)
// Queues a kernel. One with too few blocks for its grid's type is the caller's to split.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), size_t blocks, unsigned threads, void* stream,
            const Arguments&... arguments) {
  const auto queue = static_cast<QSGD_GPU_API(Stream_t)>(stream);
  kernel<<<static_cast<unsigned>(blocks), threads, 0, queue>>>(arguments...);
}
#endif

}  // namespace qsgd::gpu
