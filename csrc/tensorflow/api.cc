#include "tensorflow/api.h"

#include <dlfcn.h>

namespace qsgd::tf {
namespace {

struct Loaded {
  Api api;
  const char* missing = nullptr;
};

template <class Function>
void resolve(void* module, const char* name, Function*& function, const char*& missing) {
  function = module == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(module, name));
  if (function == nullptr && missing == nullptr) missing = name;
}

Loaded load() {
  Loaded loaded;
  // RTLD_NOLOAD: the copy that loads this library, never a second one.
  void* module = dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
#define QSGD_RESOLVE(name, result, arguments) \
  resolve(module, "TF_" #name, loaded.api.name, loaded.missing);
  QSGD_TF_FUNCTIONS(QSGD_RESOLVE)
#undef QSGD_RESOLVE
  return loaded;
}

const Loaded& loaded() {
  static const Loaded all = load();
  return all;
}

}  // namespace

const Api& api() { return loaded().api; }

const char* missing_function() { return loaded().missing; }

}  // namespace qsgd::tf
