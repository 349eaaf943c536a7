// Names for threads, so that `top -H`, perf and gdb tell ours from the framework's.
#pragma once

#include <pthread.h>

namespace qsgd {

// Names the calling thread; Linux takes at most 15 characters.
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
