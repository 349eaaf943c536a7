#include "gpu/nccl_calls.h"

#include <dlfcn.h>

#include <type_traits>

namespace qsgd::gpu {

// The library is never unloaded, because it may have threads.
std::shared_ptr<const NcclCalls> load_nccl(const std::string& path, std::string& why) {
  void* const file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    why = dlerror();
    return nullptr;
  }
  auto calls = std::make_shared<NcclCalls>();
  const auto find = [&](const char* name, auto& call) {
    call = reinterpret_cast<std::decay_t<decltype(call)>>(dlsym(file, name));
    if (call == nullptr) why = path + " has no " + name + "; NCCL 2.14 or later is needed";
  };
  find("ncclGetUniqueId", calls->get_id);
  find("ncclCommInitRankConfig", calls->init);
  find("ncclCommGetAsyncError", calls->state);
  find("ncclCommFinalize", calls->finalize);
  find("ncclCommDestroy", calls->destroy);
  find("ncclCommAbort", calls->abort);
  find("ncclAllReduce", calls->allreduce);
  find("ncclBroadcast", calls->broadcast);
  find("ncclReduceScatter", calls->reduce_scatter);
  find("ncclAllGather", calls->allgather);
  find("ncclSend", calls->send);
  find("ncclRecv", calls->receive);
  find("ncclGroupStart", calls->begin_group);
  find("ncclGroupEnd", calls->end_group);
  find("ncclGetErrorString", calls->text);
  find("ncclGetLastError", calls->last_error);
  return why.empty() ? calls : nullptr;
}

int nccl_version(const std::string& path) {
  void* const file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) return 0;
  auto* const version = reinterpret_cast<int (*)(int*)>(dlsym(file, "ncclGetVersion"));
  int number = 0;
  return version != nullptr && version(&number) == NcclCalls::kSuccess ? number : 0;
}

}  // namespace qsgd::gpu
