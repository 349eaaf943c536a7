// One binary, the best vector instructions of the machine it runs on.
#pragma once

// Functions marked so are compiled per instruction set and chosen when the library is loaded.
// -ffp-contract=off keeps their results equal bit for bit. By what a CPU can do, never by its
// model: "arch=haswell" is chosen on a Haswell and on nothing that came after it.
#if !defined(__x86_64__) || !defined(__GNUC__) || defined(QSGD_NO_CLONES)
#define QSGD_CLONES
#elif __GNUC__ >= 12 || defined(__clang__)
#define QSGD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define QSGD_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

// Where a compiler for GPUs reads a header, its functions are for both sides, but tables, and what
// reads them, for the GPU's.
#if defined(__CUDACC__) || defined(__HIP__)
#define QSGD_INLINE __host__ __device__ inline __attribute__((always_inline))
#define QSGD_TABLE __device__
#else
#define QSGD_INLINE inline __attribute__((always_inline))
#define QSGD_TABLE
#endif
