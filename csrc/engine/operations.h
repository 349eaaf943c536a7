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
      : communicator_(communicator), ranks_(ranks), reducer_(communicator, ranks, config) {}

  // Whether entries on devices must be staged on the host for the response.
  bool needs_host(const Response& response, const std::vector<Entry*>& entries) const;
  // `entries` are those that `response` names, in its order; staged, if need be. Throws when the
  // job is aborted.
  std::vector<Outcome> carry_out(const Response& response, const std::vector<Entry*>& entries);

  Reducer& reducer() { return reducer_; }
  const Reducer& reducer() const { return reducer_; }

 private:
  Result allgather(const Entry& entry, const std::vector<int64_t>& rows);
  Result alltoall(const Entry& entry);
  Result reducescatter(const Entry& entry);
  Result do_one(const Entry& entry, const Response& response);
  int place_of(int rank) const;

  Communicator communicator_;
  const std::vector<int> ranks_;
  Reducer reducer_;
};

}  // namespace qsgd
