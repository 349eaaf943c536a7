#include "gpu/library.h"

#include <dlfcn.h>

#include <type_traits>

#include "common/error.h"

namespace qsgd::gpu {

const Library& load_library(const std::string& path) {
  const std::string remedy = ". Install this package again where its compiler for GPUs is";
  void* const file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    throw usage_error("the GPU kernels cannot be loaded: " + std::string(dlerror()) + remedy);
  }
  using Entry = const Library*();
  auto* const entry = reinterpret_cast<Entry*>(dlsym(file, kLibrarySymbol));
  const Library* const library = entry == nullptr ? nullptr : entry();
  if (library != nullptr && library->version == kLibraryVersion) return *library;
  dlclose(file);
  throw usage_error(path + ": not the GPU kernels of this version" + remedy);
}

std::string fault_of(const Library& library, int device) {
  constexpr size_t kMessage = 1024, kSize = 4096;  // offset of the message; size of the memory
  CodecSpec spec;
  Run run{};
  run.dtype = DType::kFloat32;
  run.spec = spec;
  run.pieces.size = 1;
  run.pieces.buckets = 1;
  run.pieces.only.count = kTile;
  run.pieces.only.codes_at = sizeof(float);
  int before = -1, ours = -1;
  if (const char* why = library.use(device, &before)) return why;
  Stream stream = nullptr;
  void* memory = nullptr;
  const char* why = library.make_stream(&stream);
  if (why == nullptr) why = library.take(kSize, &memory, stream);
  if (why == nullptr) why = library.clear(memory, kSize, stream);
  if (why == nullptr) {
    why = library.encode(memory, run, {}, static_cast<uint8_t*>(memory) + kMessage, stream);
  }
  const std::string fault = why == nullptr ? "" : why;
  if (memory != nullptr) library.give(memory, stream);
  if (stream != nullptr) library.end_stream(stream);
  if (before != device) library.use(before, &ours);
  return fault;
}

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
