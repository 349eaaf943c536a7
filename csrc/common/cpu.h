// Features of this CPU, and functions compiled for more than the oldest one.
#pragma once

// Functions between these two macros are compiled for a CPU with the given features. Include shared
// headers before them: functions used elsewhere must not need such a CPU.
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

// Whether the CPU and the operating system support each table of kernels. Queried directly, because
// __builtin_cpu_supports() needs a compiler library that may lack the information.
bool has_avx2();    // AVX2, FMA, F16C, AES
bool has_avx512();  // AVX-512 F, BW, VL and VBMI, vector AES
bool has_neon();    // ARMv8 with AES

}  // namespace qsgd
