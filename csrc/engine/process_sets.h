// This rank's side of the process sets: who is in each, and what carries out their operations.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/operations.h"

namespace qsgd {

// Sets are changed, and their operations used, by the thread that drives the engine alone; any
// thread asks for ranks.
class ProcessSets {
 public:
  // Set 0 is everyone, through `whole`, which must outlive this.
  ProcessSets(Communicator whole, ReducerConfig config);

  void add(int32_t id, const std::vector<int>& ranks);
  void remove(int32_t id);
  // The ranks of a set. Throws a usage error where there is none, or this rank is not in it.
  std::shared_ptr<const std::vector<int>> ranks_for(const Operation& operation) const;
  // Throws a usage error for what cannot be removed.
  void check_removable(int32_t id) const;
  bool has(int32_t id) const { return sets_.count(id) != 0; }
  // See Operations::close().
  void close();
  Operations& operations(int32_t id) { return *sets_.at(id).operations; }

 private:
  struct Set {
    std::shared_ptr<const std::vector<int>> ranks;
    std::unique_ptr<Transport> transport;    // null for everyone
    std::unique_ptr<Operations> operations;  // null where this rank is no member
  };
  const Set& find(int32_t id) const;

  Communicator whole_;
  const ReducerConfig config_;
  mutable std::mutex mutex_;  // guards the map against the threads that ask
  std::map<int32_t, Set> sets_;
};

}  // namespace qsgd
