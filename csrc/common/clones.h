// Function clones: one binary that uses the best vector instructions of its machine.
#pragma once

// Marked functions are compiled for several instruction sets and selected when the library is
// loaded. -ffp-contract=off keeps their results bit-identical. Selected by features, not by model:
// "arch=haswell" is selected on a Haswell only, not on its successors. Mark functions of an unnamed
// namespace only: GCC links no clones of another file, and Clang rejects a call before the mark.
#if !defined(__x86_64__) || !defined(__GNUC__) || defined(QSGD_NO_CLONES)
#define QSGD_CLONES
#elif __GNUC__ >= 12 || defined(__clang__)
#define QSGD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define QSGD_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

// When a GPU compiler reads a header, inline functions are compiled for host and device, but tables
// and the functions that read them for the device only.
#if defined(__CUDACC__) || defined(__HIP__)
#define QSGD_INLINE __host__ __device__ inline __attribute__((always_inline))
#define QSGD_TABLE __device__
#else
#define QSGD_INLINE inline __attribute__((always_inline))
#define QSGD_TABLE
#endif
