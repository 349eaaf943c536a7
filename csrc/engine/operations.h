// Executes agreed operations with the collectives.
#pragma once

#include <memory>
#include <vector>

#include "engine/entries.h"
#include "engine/reducer.h"
#include "engine/response.h"

namespace qsgd {

class Operations {
 public:
  // `ranks`: the communicator's ranks, as numbered in the job.
  Operations(Communicator communicator, const std::vector<int>& ranks, const ReducerConfig& config)
      : communicator_(communicator),
        ranks_(ranks),
        config_(config),
        reducer_(communicator, ranks, config) {}

  // Whether the response requires staging the entries' device memory on the host.
  bool needs_host(const Response& response, const std::vector<Entry*>& entries);
  // Whether an operation that all ranks have on devices may be executed without the host.
  bool may_stay(const Operation& operation) const;
  // Executes a response. `entries` are its tensors, in order, staged if necessary. Throws if the
  // job is aborted.
  std::vector<Outcome> carry_out(const Response& response, const std::vector<Entry*>& entries);

  // Whether devices of a node may sum tensors that are then coded between nodes.
  bool may_sum_in_nodes() const { return !config_.nccl_library.empty() && !in_node_.refused(); }
  // Releases NCCL: called on all ranks, or only on this one if the job was aborted.
  void close();

  Reducer& reducer() { return reducer_; }
  const Reducer& reducer() const { return reducer_; }

 private:
  // NCCL's communicator, created on first use by all of its ranks together. Null: not available.
  struct Group {
    std::unique_ptr<Transport> transport;  // of a subset of the ranks
    std::unique_ptr<gpu::Nccl> nccl;
    bool tried = false;
    bool refused() const { return tried && nccl == nullptr; }
  };
  gpu::Nccl* nccl_for(const Response& response, const std::vector<Entry*>& entries);
  gpu::Nccl* made(Group& group, const std::vector<int>& ranks, const std::vector<Entry*>& entries,
                  gpu::Nccl::Count count);
  // `nccl`: null to send from host memory.
  Result do_one(const Entry& entry, const Response& response, gpu::Nccl* nccl);
  void broadcast(const Entry& entry, gpu::Nccl* nccl);
  Result allgather(const Entry& entry, const std::vector<int64_t>& rows, gpu::Nccl* nccl);
  Result alltoall(const Entry& entry, gpu::Nccl* nccl);
  Result reducescatter(const Entry& entry, gpu::Nccl* nccl);
  int place_of(int rank) const;

  Communicator communicator_;
  const std::vector<int> ranks_;
  const ReducerConfig config_;
  Reducer reducer_;
  Group all_;
  Group in_node_;  // ranks of this rank's node
};

}  // namespace qsgd
