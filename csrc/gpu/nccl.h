// Collectives of NCCL among the devices of a process set.
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

struct NcclCalls;

// A communicator, used by the thread that drives the engine. A collective blocks until the device's
// work for it is done. It throws if NCCL fails, or the job is aborted meanwhile.
class Nccl : public WithinNode {
 public:
  // Called by all ranks of the transport together: all get a communicator, or none does; then the
  // first rank logs the reason. `path` is the library; `device` is this rank's, or null if it has
  // none. `ranks` are the transport's, as numbered in messages. `count` is called with the bytes
  // that this rank sends.
  using Count = std::function<void(size_t size_bytes)>;
  static std::unique_ptr<Nccl> make(Transport& transport, const std::vector<int>& ranks,
                                    const std::string& path, Device* device, Count count,
                                    const std::function<void(const std::string&)>& log);
  ~Nccl() override;
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  // Whether allreduce() and reducescatter() support it. Not for minimum and maximum of floats,
  // which would lose NaN.
  static bool reduces(const ReduceArgs& args);

  // As qsgd::allreduce without a code, but NCCL determines the order of sums. Tensors on other
  // places, such as the zeros of a rank that has joined, are copied to this device and back.
  // `check_finite`: records in the tensors whether they contain NaN or Inf.
  void allreduce(std::vector<ReduceTensor>& tensors, const ReduceArgs& args, bool check_finite);
  // Sums within the node whose ranks these are, partitioned between buckets. Tensors may be
  // elsewhere, as in allreduce(); the shards are on this device.
  std::unique_ptr<NodeHalves> cut(std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                                  int owners) override;
  // In the following, memory is on `place`, as for a tensor; `root` is a rank of the transport.
  void broadcast(void* data, size_t size_bytes, int root, const Place* place);
  // As the functions of these names in qsgd; sizes are in bytes, counts in elements.
  void allgather(const void* in, void* out, const std::vector<size_t>& sizes, const Place* place);
  void alltoall(const void* in, const std::vector<size_t>& given, void* out,
                const std::vector<size_t>& received, const Place* place);
  void reducescatter(const void* in, void* out, const std::vector<size_t>& counts,
                     const ReduceArgs& args, const Place* place);

  Device& device() const { return device_; }
  // Closes the communicator together with all ranks; if that times out, aborts it.
  void close();

 private:
  class Local;
  class Tensors;
  class Halves;
  Nccl(std::shared_ptr<const NcclCalls> calls, Device& device, Transport& transport, Count count);
  // Joins the ranks with the same id; returns the error, or an empty string.
  std::string join(const std::string& id);
  // Whether NCCL has completed the last call; throws its error.
  bool call_done() const;
  void await_call(int result) const;
  // Waits up to `patience`; returns whether NCCL has completed. Throws if the job is aborted.
  bool done_within(std::chrono::seconds patience) const;
  [[noreturn]] void fail(int result) const;
  // Queues the calls that `calls` makes through its argument, as one.
  using Call = std::function<void(int result)>;
  void grouped(const std::function<void(const Call& call)>& calls) const;
  // Blocks until the queued work is done, and then that which `deliver` queues: a copy to pageable
  // memory, such as that of a rank that has joined, blocks in the driver, and must not wait for
  // other ranks there.
  void finish(const std::function<void()>& deliver);
  // Counts the bytes that each rank has sent in `rounds` rounds of a ring.
  void count(size_t size_bytes, int rounds) const;

  const std::shared_ptr<const NcclCalls> calls_;
  Device& device_;
  AbortFlag& abort_;
  const Count count_;
  const int rank_, size_;
  void* communicator_ = nullptr;  // ncclComm_t
};

}  // namespace qsgd::gpu
