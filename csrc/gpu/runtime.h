// Abstraction of CUDA, of HIP, and of the emulation that runs the kernels on the CPU in tests.
#pragma once

// The functions of CUDA and HIP have the same names, except for the prefix.
#if defined(QSGD_GPU_TWIN)
#include "cuda_on_cpu.h"
#define QSGD_GPU_API(name) gpu_twin::name
#define QSGD_GPU_NAME "twin"
#elif defined(__HIP__)
#include <hip/hip_runtime.h>
// The second argument counts thread blocks, as in CUDA; HIP would count wavefronts, and would then
// spill values that fit in registers.
#undef __launch_bounds__
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define QSGD_GPU_API(name) hip##name
#define QSGD_GPU_NAME "HIP"
#else
#include <cuda_runtime.h>
#define QSGD_GPU_API(name) cuda##name
#define QSGD_GPU_NAME "CUDA"
#endif
#if !defined(QSGD_GPU_BUILT)  // with the GPUs it was compiled for
#define QSGD_GPU_BUILT QSGD_GPU_NAME
#endif

namespace qsgd::gpu {

// Number of lanes that work together: half a wavefront if that has 64.
constexpr int kLanesShift = 5;
constexpr int kLanes = 1 << kLanesShift;

// Returns the text of an error, or null. Clears the last error, so that it is not attributed to a
// later launch.
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
// A wavefront runs in lockstep and accesses shared memory in program order. This only prevents the
// compiler from reordering, and costs no instruction. Halves of a wavefront need not synchronize.
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
// Queues a kernel. Callers must split grids that exceed the type of the block count.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), size_t blocks, unsigned threads, void* stream,
            const Arguments&... arguments) {
  const auto queue = static_cast<QSGD_GPU_API(Stream_t)>(stream);
  kernel<<<static_cast<unsigned>(blocks), threads, 0, queue>>>(arguments...);
}
#endif

}  // namespace qsgd::gpu
