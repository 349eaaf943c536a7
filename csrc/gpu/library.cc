#include "gpu/library.h"

#include <dlfcn.h>

#include "common/error.h"

namespace qsgd::gpu {

const Library& load_library(const std::string& path) {
  const std::string remedy = ". Install this package again where its compiler for GPUs is";
  void* const file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    throw usage_error("GPU kernels cannot be loaded: " + std::string(dlerror()) + remedy);
  }
  using Entry = const Library*();
  auto* const entry = reinterpret_cast<Entry*>(dlsym(file, kLibrarySymbol));
  const Library* const library = entry == nullptr ? nullptr : entry();
  if (library != nullptr && library->version == kLibraryVersion) return *library;
  dlclose(file);
  throw usage_error(path + ": not the GPU kernels of this version" + remedy);
}

}  // namespace qsgd::gpu
