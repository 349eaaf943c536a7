// The pending operations of this rank, by process set and name.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/handle.h"
#include "engine/operation.h"
#include "gpu/device.h"

namespace qsgd {

class HostCopy;  // engine/staging.h

// An operation that this rank has started. A broadcast uses `out` only.
struct Entry {
  OperationPtr operation;
  const void* in = nullptr;
  void* out = nullptr;
  std::shared_ptr<Handle> handle;  // null: it stands in for a rank that has joined
  // For device memory: when the tensor is ready. Null: it is in host memory, and ready.
  std::shared_ptr<gpu::Mark> ready = nullptr;
  std::shared_ptr<HostCopy> copy = nullptr;  // for device memory, once needed
  gpu::Device* copied_from = nullptr;        // of such a copy's entry

  // Of the tensor; null: it is in host memory.
  gpu::Device* device() const { return ready == nullptr ? nullptr : &ready->device(); }
};

// Result of an operation on this rank, or the error with which it failed on all ranks.
struct Outcome {
  Fault fault;
  Result result;
};

using Ended = std::pair<Key, Outcome>;

// Any thread may add. Only the thread that drives the engine finds and ends entries, so a found
// entry stays valid.
class Entries {
 public:
  // Its name must be free.
  void add(Entry entry);
  bool has(const Key& key) const;
  bool has(const Key& key, OpKind kind) const;
  bool empty() const { return size() == 0; }
  size_t size() const;
  std::string example() const;  // a name
  // Operations that a thread of the program has been waiting for, for at least `seconds`.
  std::vector<Key> waited_for(double seconds) const;
  Entry* find(const Key& key);  // null if there is none
  // Removes the operations, then completes their handles. Unknown keys are ignored.
  void end(std::vector<Ended> ended);
  void fail_all(const std::string& message);

 private:
  mutable std::mutex mutex_;
  KeyMap<Entry> entries_;
};

}  // namespace qsgd
