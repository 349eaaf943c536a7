// Carries out what the ranks have agreed on, with the collectives.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/entries.h"
#include "engine/reducer.h"
#include "engine/response.h"

namespace qsgd {

class Operations {
 public:
  // `ranks` are the communicator's, as the whole job counts them.
  Operations(Communicator communicator, const std::vector<int>& ranks, const ReducerConfig& config)
      : communicator_(communicator),
        ranks_(ranks),
        config_(config),
        reducer_(communicator, ranks, config) {}

  // Whether entries on devices must be staged on the host for the response.
  bool needs_host(const Response& response, const std::vector<Entry*>& entries);
  // Whether an operation on tensors that all ranks have on devices may do without the host.
  bool may_stay(const Operation& operation) const;
  // `entries` are those that `response` names, in its order; staged, if need be. Throws when the
  // job is aborted.
  std::vector<Outcome> carry_out(const Response& response, const std::vector<Entry*>& entries);

  // Whether devices of a node may sum what is then coded between nodes.
  bool may_sum_in_nodes() const { return !config_.nccl_library.empty() && !in_node_.refused(); }
  // No more comes for devices: on all ranks, or, if the job was aborted, on this one.
  void close();

  Reducer& reducer() { return reducer_; }
  const Reducer& reducer() const { return reducer_; }

 private:
  // NCCL's communicator, the first time made by all of its ranks together. Null: there is none.
  struct Group {
    std::unique_ptr<Transport> transport;  // of a part of the ranks
    std::unique_ptr<gpu::Nccl> nccl;
    bool tried = false;
    bool refused() const { return tried && nccl == nullptr; }
  };
  gpu::Nccl* nccl_for(const Response& response, const std::vector<Entry*>& entries);
  gpu::Nccl* made(Group& group, const std::vector<int>& ranks, const std::vector<Entry*>& entries,
                  gpu::Nccl::Count count);
  std::vector<Outcome> by_nccl(gpu::Nccl& nccl, const Response& response,
                               const std::vector<Entry*>& entries);
  Result allgather(const Entry& entry, const std::vector<int64_t>& rows);
  Result alltoall(const Entry& entry);
  Result reducescatter(const Entry& entry);
  Result do_one(const Entry& entry, const Response& response);
  int place_of(int rank) const;

  Communicator communicator_;
  const std::vector<int> ranks_;
  const ReducerConfig config_;
  Reducer reducer_;
  Group all_;
  Group in_node_;  // with those that share this rank's node
};

}  // namespace qsgd
