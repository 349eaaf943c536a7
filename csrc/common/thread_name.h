// Thread names, so that `top -H`, perf and gdb distinguish the core's threads from the framework's.
#pragma once

#include <pthread.h>

namespace qsgd {

// Names the calling thread, with at most 15 characters on Linux.
inline void name_thread(const char* name) {
#if defined(__APPLE__)
  pthread_setname_np(name);
#elif defined(__linux__)
  pthread_setname_np(pthread_self(), name);
#else
  static_cast<void>(name);
#endif
}

}  // namespace qsgd
