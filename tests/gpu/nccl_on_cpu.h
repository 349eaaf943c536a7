// NCCL's communicators among processes of one machine, for the streams of streams_on_cpu.h. Ranks
// send through sockets. Rank 0 adds up what it gets from the others, and sends them the result. As
// NCCL that is told not to block, a communicator comes into being while its caller goes on.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "streams_on_cpu.h"

namespace gpu_twin {

enum Result { kOk = 0, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7 };
struct NcclId {
  char bytes[128];
};

class NcclGroup {
 public:
  NcclGroup(std::string name, int size, int rank)
      : name_(std::move(name)), size_(size), rank_(rank) {
    thread_ = std::thread([this] { meet(); });
  }
  ~NcclGroup() {
    close();
    thread_.join();
    for (const int fd : peers_) ::close(fd);
    if (listener_ >= 0) ::close(listener_);
  }

  int state() const { return state_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Ends waits.
  void close() {
    ending_ = true;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const int fd : peers_) shutdown(fd, SHUT_RDWR);
    if (listener_ >= 0) shutdown(listener_, SHUT_RDWR);
  }

  // Rank 0 hands combine(rank, what that rank sent) the others' bytes, and all get rank 0's.
  template <class Combine>
  void reduce(char* data, size_t size_bytes, const Combine& combine) {
    if (rank_ != 0) {
      give(0, data, size_bytes);
      take(0, data, size_bytes);
      return;
    }
    std::vector<char> other(size_bytes);
    for (int r = 1; r < size_; ++r) {
      take(r, other.data(), size_bytes);
      if (state_ == kOk) combine(other.data());
    }
    for (int r = 1; r < size_; ++r) give(r, data, size_bytes);
  }

  struct Message {
    int peer;
    char* data;
    size_t size_bytes;
  };
  // What this rank gives to others and takes from them, at the same time.
  void exchange(const std::vector<Message>& given, const std::vector<Message>& taken) {
    std::thread giver([&] {
      for (const Message& m : given) give(m.peer, m.data, m.size_bytes);
    });
    for (const Message& m : taken) take(m.peer, m.data, m.size_bytes);
    giver.join();
  }

  // Through rank 0.
  void broadcast(char* data, size_t size_bytes, int root) {
    if (rank_ == 0) {
      if (root != 0) take(root, data, size_bytes);
      for (int r = 1; r < size_; ++r) give(r, data, size_bytes);
    } else {
      if (root == rank_) give(0, data, size_bytes);
      take(0, data, size_bytes);
    }
  }

 private:
  // Each rank waits for those above it, and comes to those below it.
  void meet() {
    std::vector<int> peers(static_cast<size_t>(size_), -1);
    const Address mine = address_of(rank_);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool ok = bind(listener, mine.get(), mine.length) == 0 && listen(listener, size_) == 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      listener_ = listener;
    }
    for (int r = 0; ok && r < rank_; ++r) {
      const Address its = address_of(r);
      const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      while (connect(fd, its.get(), its.length) != 0 && !ending_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const int32_t who = rank_;
      ok = send(fd, &who, sizeof who, MSG_NOSIGNAL) == sizeof who;
      peers[static_cast<size_t>(r)] = fd;
    }
    for (int r = rank_ + 1; ok && r < size_; ++r) {
      const int peer = accept(listener, nullptr, nullptr);
      int32_t its = -1;
      ok = peer >= 0 && recv(peer, &its, sizeof its, MSG_WAITALL) == sizeof its;
      if (ok) peers[static_cast<size_t>(its)] = peer;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    peers_ = std::move(peers);
    state_ = ok ? kOk : kRemoteError;
  }

  struct Address {
    sockaddr_un bytes{};
    socklen_t length = 0;
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  };
  Address address_of(int rank) const {
    const std::string name = name_ + "-" + std::to_string(rank);
    Address address;
    address.bytes.sun_family = AF_UNIX;
    std::memcpy(address.bytes.sun_path + 1, name.data(), name.size());
    address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
  }

  void give(int to, const char* data, size_t size_bytes) {
    for (size_t done = 0; state_ == kOk && done < size_bytes;) {
      const ssize_t n = send(peer(to), data + done, size_bytes - done, MSG_NOSIGNAL);
      if (n <= 0) state_ = kRemoteError;
      done += static_cast<size_t>(std::max<ssize_t>(n, 0));
    }
  }
  void take(int from, char* data, size_t size_bytes) {
    for (size_t done = 0; state_ == kOk && done < size_bytes;) {
      const ssize_t n = recv(peer(from), data + done, size_bytes - done, 0);
      if (n <= 0) state_ = kRemoteError;
      done += static_cast<size_t>(std::max<ssize_t>(n, 0));
    }
  }
  int peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }

  const std::string name_;
  const int size_, rank_;
  std::atomic<int> state_{kInProgress};
  std::atomic<bool> ending_{false};
  std::mutex mutex_;  // guards the sockets while they come into being
  std::vector<int> peers_;
  int listener_ = -1;
  std::thread thread_;
};

struct NcclComm {
  std::shared_ptr<NcclGroup> group;
};

// What a thread has given and taken since it has begun a group of calls, in the order of ranks.
struct Exchange {
  bool begun = false;
  std::shared_ptr<NcclGroup> group;
  void* stream = nullptr;
  std::vector<NcclGroup::Message> given, taken;
};
inline Exchange& exchange() {
  thread_local Exchange its;
  return its;
}

template <class T>
void combine_as(void* into, const void* from, size_t count, int op) {
  constexpr bool kNarrow = std::is_same_v<T, qsgd::Float16> || std::is_same_v<T, qsgd::BFloat16>;
  using Wide = std::conditional_t<kNarrow, float, T>;
  auto* const a = static_cast<T*>(into);
  const auto* const b = static_cast<const T*>(from);
  for (size_t i = 0; i < count; ++i) {
    const auto x = static_cast<Wide>(a[i]), y = static_cast<Wide>(b[i]);
    const Wide sum = static_cast<Wide>(x + y), product = static_cast<Wide>(x * y);
    a[i] = static_cast<T>(op == 0   ? sum
                          : op == 1 ? product
                          : op == 2 ? std::max(x, y)
                                    : std::min(x, y));
  }
}

// Collectives that this process has begun.
inline std::atomic<int>& collectives() {
  static std::atomic<int> begun{0};
  return begun;
}
inline void collect(void* stream, Job job) {
  ++collectives();
  queue(static_cast<Stream_t>(stream), std::move(job));
}

// Of NCCL's types; null: an unknown one.
using CombineFunction = void (*)(void*, const void*, size_t, int);
struct TypeOf {
  size_t size;
  CombineFunction combine;
};
inline TypeOf type_of(int type) {
  switch (type) {
    case 0:
      return {1, combine_as<int8_t>};
    case 1:
      return {1, combine_as<uint8_t>};
    case 2:
      return {4, combine_as<int32_t>};
    case 4:
      return {8, combine_as<int64_t>};
    case 6:
      return {2, combine_as<qsgd::Float16>};
    case 7:
      return {4, combine_as<float>};
    case 8:
      return {8, combine_as<double>};
    case 9:
      return {2, combine_as<qsgd::BFloat16>};
    default:
      return {0, nullptr};
  }
}

}  // namespace gpu_twin

#define QSGD_TWIN extern "C" __attribute__((used, visibility("default"))) inline

QSGD_TWIN int qsgd_nccl_twin_collectives() { return gpu_twin::collectives(); }
QSGD_TWIN int ncclGetVersion(int* version) {
  *version = 22703;
  return gpu_twin::kOk;
}
QSGD_TWIN int ncclGetUniqueId(gpu_twin::NcclId* id) {
  static std::atomic<int> made{0};
  std::memset(id->bytes, 0, sizeof id->bytes);
  std::snprintf(id->bytes, sizeof id->bytes, "qsgd-nccl-twin-%d-%d", static_cast<int>(getpid()),
                ++made);
  return gpu_twin::kOk;
}
QSGD_TWIN int ncclCommInitRankConfig(void** comm, int size, gpu_twin::NcclId id, int rank, void*) {
  *comm = new gpu_twin::NcclComm{std::make_shared<gpu_twin::NcclGroup>(id.bytes, size, rank)};
  return gpu_twin::kInProgress;
}
QSGD_TWIN int ncclCommGetAsyncError(void* comm, int* state) {
  *state = static_cast<gpu_twin::NcclComm*>(comm)->group->state();
  return gpu_twin::kOk;
}
QSGD_TWIN int ncclCommFinalize(void*) { return gpu_twin::kOk; }
QSGD_TWIN int ncclCommDestroy(void* comm) {
  delete static_cast<gpu_twin::NcclComm*>(comm);
  return gpu_twin::kOk;
}
QSGD_TWIN int ncclCommAbort(void* comm) {
  static_cast<gpu_twin::NcclComm*>(comm)->group->close();
  return ncclCommDestroy(comm);
}
QSGD_TWIN int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* comm,
                            void* stream) {
  using namespace gpu_twin;
  const TypeOf its = type_of(type);
  if (its.combine == nullptr) return kInvalidUsage;
  collect(stream, [=, group = static_cast<NcclComm*>(comm)->group] {
    if (to != from) std::memmove(to, from, count * its.size);
    group->reduce(static_cast<char*>(to), count * its.size,
                  [&](const void* other) { its.combine(to, other, count, op); });
  });
  return kOk;
}
QSGD_TWIN int ncclBroadcast(const void* from, void* to, size_t count, int type, int root,
                            void* comm, void* stream) {
  using namespace gpu_twin;
  const size_t size_bytes = count * type_of(type).size;
  collect(stream, [=, group = static_cast<NcclComm*>(comm)->group] {
    if (to != from) std::memmove(to, from, size_bytes);
    group->broadcast(static_cast<char*>(to), size_bytes, root);
  });
  return kOk;
}
QSGD_TWIN int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op,
                                void* comm, void* stream) {
  using namespace gpu_twin;
  const TypeOf its = type_of(type);
  if (its.combine == nullptr) return kInvalidUsage;
  collect(stream, [=, group = static_cast<NcclComm*>(comm)->group] {
    const size_t size = static_cast<size_t>(group->size()) * count;
    const auto* const begin = static_cast<const char*>(from);
    std::vector<char> sums(begin, begin + size * its.size);
    group->reduce(sums.data(), sums.size(),
                  [&](const void* other) { its.combine(sums.data(), other, size, op); });
    const size_t mine = static_cast<size_t>(group->rank()) * count * its.size;
    std::memcpy(to, sums.data() + mine, count * its.size);
  });
  return kOk;
}
QSGD_TWIN int ncclAllGather(const void* from, void* to, size_t count, int type, void* comm,
                            void* stream) {
  using namespace gpu_twin;
  const size_t each = count * type_of(type).size;
  collect(stream, [=, group = static_cast<NcclComm*>(comm)->group] {
    auto* const begin = static_cast<char*>(to);
    std::memmove(begin + static_cast<size_t>(group->rank()) * each, from, each);
    for (int r = 0; r < group->size(); ++r) {
      group->broadcast(begin + static_cast<size_t>(r) * each, each, r);
    }
  });
  return kOk;
}
QSGD_TWIN int ncclGroupStart() {
  gpu_twin::exchange() = {true, nullptr, nullptr, {}, {}};
  return gpu_twin::kOk;
}
QSGD_TWIN int ncclSend(const void* from, size_t count, int type, int peer, void* comm,
                       void* stream) {
  using namespace gpu_twin;
  Exchange& its = exchange();
  if (!its.begun) return kInvalidUsage;
  its.group = static_cast<NcclComm*>(comm)->group;
  its.stream = stream;
  auto* const data = static_cast<char*>(const_cast<void*>(from));
  its.given.push_back({peer, data, count * type_of(type).size});
  return kOk;
}
QSGD_TWIN int ncclRecv(void* to, size_t count, int type, int peer, void* comm, void* stream) {
  using namespace gpu_twin;
  Exchange& its = exchange();
  if (!its.begun) return kInvalidUsage;
  its.group = static_cast<NcclComm*>(comm)->group;
  its.stream = stream;
  its.taken.push_back({peer, static_cast<char*>(to), count * type_of(type).size});
  return kOk;
}
QSGD_TWIN int ncclGroupEnd() {
  using namespace gpu_twin;
  Exchange its = std::exchange(exchange(), {});
  if (!its.begun) return kInvalidUsage;
  if (its.group == nullptr) return kOk;
  collect(its.stream, [its] { its.group->exchange(its.given, its.taken); });
  return kInProgress;
}
QSGD_TWIN const char* ncclGetErrorString(int result) {
  switch (result) {
    case gpu_twin::kOk:
      return "no error";
    case gpu_twin::kInvalidUsage:
      return "invalid usage";
    case gpu_twin::kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "unknown result code";
  }
}
QSGD_TWIN const char* ncclGetLastError(void*) { return ""; }
#undef QSGD_TWIN
