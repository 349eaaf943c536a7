#include "transport/mpi_transport.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "common/error.h"

namespace qsgd {
namespace {

// MPI counts are ints; longer messages are sent in parts, which MPI keeps in order.
constexpr size_t kPartBytes = size_t{1} << 30;
constexpr std::chrono::seconds kLifelineDelay{1};  // maximum; usually milliseconds

// Large enough for the MPI_Status of any MPI (24 to 40 bytes). It is never read; passing it avoids
// the constant MPI_STATUS_IGNORE, whose value differs.
struct alignas(16) AnyStatus {
  unsigned char bytes[256];
};

template <class Handle>
struct MpiFunctions {
  int (*isend)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*issend)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*irecv)(void*, int, Handle, int, int, Handle, Handle*);
  int (*test)(Handle*, int*, AnyStatus*);
  int (*iprobe)(int, int, Handle, int*, AnyStatus*);
  int (*error_string)(int, char*, int*);
};

template <class Function>
void resolve(void* module, const char* name, const MpiFacts& facts, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(module, name));
  if (function == nullptr) {
    throw usage_error(std::string("the MPI library in this process has no ") + name + " (" +
                      facts.library + "). Point MPI4PY_LIBMPI at the libmpi of your MPI.");
  }
}

template <class Handle>
MpiFunctions<Handle> load(const MpiFacts& facts) {
  // RTLD_NOLOAD: never a second copy. dlsym then searches mpi4py's module and its dependencies, so
  // the name of the MPI library does not matter.
  void* module = dlopen(facts.module_path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (module == nullptr) {
    throw usage_error("mpi4py is not loaded from " + facts.module_path +
                      "; import mpi4py.MPI before starting the core");
  }
  MpiFunctions<Handle> f{};
  resolve(module, "MPI_Isend", facts, f.isend);
  resolve(module, "MPI_Issend", facts, f.issend);
  resolve(module, "MPI_Irecv", facts, f.irecv);
  resolve(module, "MPI_Test", facts, f.test);
  resolve(module, "MPI_Iprobe", facts, f.iprobe);
  resolve(module, "MPI_Error_string", facts, f.error_string);
  return f;
}

template <class Handle>
Handle to_handle(std::uintptr_t value) {
  if constexpr (std::is_pointer_v<Handle>) {
    return reinterpret_cast<Handle>(value);
  } else {
    return static_cast<Handle>(value);
  }
}

template <class Handle>
class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(const MpiFacts& facts)
      : Transport(facts.rank, facts.size, std::make_shared<AbortFlag>()),
        mpi_(load<Handle>(facts)),
        comm_(to_handle<Handle>(facts.comm)),
        byte_(to_handle<Handle>(facts.byte_type)) {}

  RequestPtr irecv(int peer, Tag tag, void* data, size_t capacity_bytes) override {
    return start(peer, "MPI_Irecv", static_cast<char*>(data), capacity_bytes,
                 [&](char* at, int count, Handle* handle) {
                   return mpi_.irecv(at, count, byte_, peer, static_cast<int>(tag), comm_, handle);
                 });
  }

  // MPI_Iprobe progresses all messages if it does not find this one, which nobody sends.
  void progress() override {
    int found = 0;
    AnyStatus status;
    const int tag = static_cast<int>(Tag::kSubmit);
    check(mpi_.iprobe(rank(), tag, comm_, &found, &status), "MPI_Iprobe", rank());
  }

 protected:
  RequestPtr isend_impl(int peer, Tag tag, const void* data, size_t size_bytes,
                        Completion completion) override {
    const bool matched = completion == Completion::kMatched;
    const auto send = matched ? mpi_.issend : mpi_.isend;
    return start(peer, matched ? "MPI_Issend" : "MPI_Isend", static_cast<const char*>(data),
                 size_bytes, [&](const char* at, int count, Handle* handle) {
                   return send(at, count, byte_, peer, static_cast<int>(tag), comm_, handle);
                 });
  }

 private:
  class Parts final : public Request {
   public:
    Parts(const MpiTransport& owner, int peer) : owner_(owner), peer_(peer) {}
    bool test() override {
      while (next_ < handles.size()) {
        int done = 0;
        AnyStatus status;
        owner_.check(owner_.mpi_.test(&handles[next_], &done, &status), "MPI_Test", peer_);
        if (!done) return false;
        ++next_;
      }
      return true;
    }
    std::vector<Handle> handles;

   private:
    const MpiTransport& owner_;
    const int peer_;
    size_t next_ = 0;
  };

  // Starts one operation per part; an empty message is one part of no bytes.
  template <class Byte, class Start>
  RequestPtr start(int peer, const char* what, Byte* data, size_t size_bytes, Start&& start_part) {
    auto request = std::make_unique<Parts>(*this, peer);
    size_t at = 0;
    do {
      const size_t part = std::min(size_bytes - at, kPartBytes);
      Handle handle{};
      check(start_part(data + at, static_cast<int>(part), &handle), what, peer);
      request->handles.push_back(handle);
      at += part;
    } while (at < size_bytes);
    return request;
  }

  // A message fails if its peer has died, but also if the peer has ended because of another rank:
  // the lifeline reports which, possibly later.
  void check(int code, const char* what, int peer) const {
    if (code == 0) return;
    const AbortFlag& abort = *shared_abort_flag();
    const auto end = std::chrono::steady_clock::now() + kLifelineDelay;
    while (!abort.raised() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    abort.check();
    char text[4096] = {};
    int length = 0;
    mpi_.error_string(code, text, &length);
    throw Error(ErrorKind::kRankFailed, std::string(what) + " with rank " + std::to_string(peer) +
                                            " failed on rank " + std::to_string(rank()) + ": " +
                                            text);
  }

  const MpiFunctions<Handle> mpi_;
  const Handle comm_;
  const Handle byte_;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(const MpiFacts& facts) {
  if (facts.pointer_handles) return std::make_unique<MpiTransport<void*>>(facts);
  return std::make_unique<MpiTransport<int>>(facts);
}

}  // namespace qsgd
