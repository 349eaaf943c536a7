// Collectives of NCCL, or of RCCL which has the same calls, among the devices of a process set. The
// library is found at run time, and may be missing: nothing of it is needed to build this.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/algorithm.h"
#include "gpu/device.h"
#include "transport/transport.h"

namespace qsgd::gpu {

struct NcclCalls;  // of the library

// One communicator, for the thread that drives the engine. A collective returns once the device's
// work for it is done, and throws when the job is aborted meanwhile or NCCL fails.
class Nccl : public WithinNode {
 public:
  // Of all ranks of the transport together: each gets one, or none does. Then `log` is told why, on
  // the first of them. `path` is the library; `device` is this rank's; null: it has none. `ranks`
  // are the transport's, as messages name them. `count` is told what this rank hands to others.
  using Count = std::function<void(size_t size_bytes)>;
  static std::unique_ptr<Nccl> make(Transport& transport, const std::vector<int>& ranks,
                                    const std::string& path, Device* device, Count count,
                                    const std::function<void(const std::string&)>& log);
  ~Nccl() override;
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  // Whether allreduce() can do it. Not a minimum or maximum of floats: NaN would be lost there.
  static bool reduces(const ReduceArgs& args);

  // As qsgd::allreduce without a coding, but that the order of a sum is NCCL's. Tensors whose place
  // is not this device, such as the zeros of a rank that has joined, are copied there and back.
  // `look`: the tensors are told whether they have NaN or Inf.
  void allreduce(std::vector<ReduceTensor>& tensors, const ReduceArgs& args, bool look);
  // Of the node whose ranks these are: sums by NCCL, cut between buckets. Tensors may be elsewhere,
  // as before; the shards are in this device.
  std::unique_ptr<NodeHalves> cut(std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                                  int owners) override;
  // `root` is a rank of the transport; `data` is at `place`, as a tensor's.
  void broadcast(void* data, size_t size_bytes, int root, const Place* place);

  Device& device() { return device_; }
  // Ends it, when all ranks do; else gives up what is under way.
  void close();

 private:
  class Tensors;
  class Halves;
  Nccl(std::shared_ptr<const NcclCalls> calls, Device& device, Transport& transport, Count count);
  // Joins the ranks that have the same id; what went wrong, or nothing.
  std::string join(const std::string& id);
  // Whether the library is done with what it was told last; throws what it failed with.
  bool settled() const;
  void settle(int result) const;
  // Waits so long for it to settle; whether it has. Throws when the job is aborted, too.
  bool settles_within(std::chrono::seconds patience) const;
  [[noreturn]] void fail(int result) const;
  // Waits for what is queued.
  void finish();
  // All ranks have handed each other so much, as often, in a ring.
  void count(size_t size_bytes, int rounds) const;

  const std::shared_ptr<const NcclCalls> calls_;
  Device& device_;
  AbortFlag& abort_;
  const Count count_;
  const int rank_, size_;
  void* communicator_ = nullptr;  // ncclComm_t
};

// The version of a library, as 22703 for 2.27.3; 0 where there is none.
int nccl_version(const std::string& path);

}  // namespace qsgd::gpu
