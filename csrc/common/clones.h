// One binary, the best vector instructions of the machine it runs on.
#pragma once

// Functions marked so are compiled per instruction set and chosen when the library is loaded.
// -ffp-contract=off keeps their results equal bit for bit.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(QSGD_NO_CLONES)
#define QSGD_CLONES __attribute__((target_clones("arch=icelake-server", "arch=haswell", "default")))
#else
#define QSGD_CLONES
#endif

#define QSGD_INLINE inline __attribute__((always_inline))
