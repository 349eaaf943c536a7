// What this CPU can run, and functions that are compiled for more than the oldest one.
#pragma once

// The functions between these two are compiled for a CPU with the features in the string. Include
// what others use as well before them: a function of a shared header must not need such a CPU.
#define QSGD_PRAGMA(words) _Pragma(#words)
#if defined(__clang__)
#define QSGD_BEGIN_TARGET(features) \
  QSGD_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define QSGD_END_TARGET QSGD_PRAGMA(clang attribute pop)
#else
#define QSGD_BEGIN_TARGET(features) QSGD_PRAGMA(GCC push_options) QSGD_PRAGMA(GCC target(features))
#define QSGD_END_TARGET QSGD_PRAGMA(GCC pop_options)
#endif

namespace qsgd {

// Whether the CPU and the operating system have what each table of kernels needs. Asked of the
// machine itself: __builtin_cpu_supports() needs a library of the compiler, which may know nothing.
bool has_avx2();    // AVX2, FMA, F16C, AES
bool has_avx512();  // AVX-512 F, BW, VL and VBMI, vector AES
bool has_neon();    // ARMv8 with AES

}  // namespace qsgd
