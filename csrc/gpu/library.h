// Loads the libraries for GPUs, because the core must run without a GPU: the kernels, and NCCL.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "gpu/codec.h"

namespace qsgd::gpu {

// Throws a usage error with the remedy if the file is not of this version.
const Library& load_library(const std::string& path);

// Returns why the kernels do not work on a visible device; empty if they do. The driver may be too
// old, or the kernels not compiled for the device.
std::string fault_of(const Library& library, int device);

// The library of NCCL, or of RCCL with the same functions, which may be missing and is not needed
// at build time. Declarations of nccl.h, version 2.14 and later.
struct NcclCalls {
  static constexpr int kSuccess = 0, kInProgress = 7;
  struct Id {
    char bytes[128];
  };
  struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21400;  // of these fields
    int blocking = 0;
  };

  using Result = int;
  Result (*get_id)(Id*);
  Result (*init)(void**, int, Id, int, Config*);
  Result (*state)(void*, Result*);
  Result (*finalize)(void*);
  Result (*destroy)(void*);
  Result (*abort)(void*);
  Result (*allreduce)(const void*, void*, size_t, int, int, void*, Stream);
  Result (*broadcast)(const void*, void*, size_t, int, int, void*, Stream);
  Result (*reduce_scatter)(const void*, void*, size_t, int, int, void*, Stream);
  Result (*allgather)(const void*, void*, size_t, int, void*, Stream);
  Result (*send)(const void*, size_t, int, int, void*, Stream);
  Result (*receive)(void*, size_t, int, int, void*, Stream);
  Result (*begin_group)();
  Result (*end_group)();
  const char* (*text)(Result);
  const char* (*last_error)(void*);

  std::string describe(Result result, void* communicator) const {
    std::string said = text(result);
    const char* const more = last_error(communicator);
    if (more != nullptr && *more != '\0') said += std::string(": ") + more;
    return said;
  }
};

// Null if the library is missing or too old; `why` is then the reason.
std::shared_ptr<const NcclCalls> load_nccl(const std::string& path, std::string& why);
// The version of a library, such as 22703 for 2.27.3; 0 if there is none.
int nccl_version(const std::string& path);

}  // namespace qsgd::gpu
