// This rank's process sets: their ranks, and the objects that execute their operations.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/operations.h"

namespace qsgd {

// Only the thread that drives the engine changes sets and uses their operations; any thread may
// read ranks.
class ProcessSets {
 public:
  // Set 0 is all ranks, through `whole`, which must outlive this.
  ProcessSets(Communicator whole, ReducerConfig config);

  void add(int32_t id, const std::vector<int>& ranks);
  void remove(int32_t id);
  // The ranks of a set. Throws a usage error if the set does not exist or lacks this rank.
  std::shared_ptr<const std::vector<int>> ranks_for(const Operation& operation) const;
  // Throws a usage error if the set cannot be removed.
  void check_removable(int32_t id) const;
  bool has(int32_t id) const { return sets_.count(id) != 0; }
  // The quality of this rank's tensors of all sets; of equal names, the one of the lowest set.
  std::map<std::string, TensorQuality> quality() const;
  // See Operations::close().
  void close();
  Operations& operations(int32_t id) { return *sets_.at(id).operations; }
  // Null if this rank is not in the set. Throws a usage error if the set does not exist.
  Reducer* reducer(int32_t id);
  // Deletes the residuals of these names.
  void forget_owed(const std::vector<std::string>& names);

 private:
  struct Set {
    std::shared_ptr<const std::vector<int>> ranks;
    std::unique_ptr<Transport> transport;    // null for set 0
    std::unique_ptr<Operations> operations;  // null if this rank is not in the set
  };
  const Set& find(int32_t id) const;

  Communicator whole_;
  const ReducerConfig config_;
  mutable std::mutex mutex_;  // guards the map against threads that read it
  std::map<int32_t, Set> sets_;
};

}  // namespace qsgd
