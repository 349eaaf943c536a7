// The operations that this rank has under way, by process set and name.
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

// An operation that this rank has started. A broadcast works on `out` alone.
struct Entry {
  OperationPtr operation;
  const void* in = nullptr;
  void* out = nullptr;
  std::shared_ptr<Handle> handle;
  // Of a tensor in a device's memory: when it is ready there. Null: it is the processor's, and is.
  std::shared_ptr<gpu::Mark> ready = nullptr;
  std::shared_ptr<HostCopy> copy = nullptr;  // of such a tensor, once it is wanted

  bool is_ready() const { return ready == nullptr || ready->passed(); }
};

// How one operation ended on this rank: with a result, or for all ranks with a message.
struct Outcome {
  ErrorKind error = ErrorKind::kNone;
  std::string message;
  Result result;
};

using Ended = std::pair<Key, Outcome>;

// Many threads add; the one that drives the engine finds and ends: what it has found stays.
class Entries {
 public:
  // False when the name is taken.
  bool add(Entry entry);
  bool has(const Key& key) const;
  bool empty() const { return size() == 0; }
  size_t size() const;
  std::string example() const;  // a name
  // Those that a thread of the program has waited for so long, and still does, though nothing but
  // other ranks can keep them.
  std::vector<Key> waited_for(double seconds) const;
  Entry* find(const Key& key);  // null where there is none
  // Ends the operations' handles, once all of them have left; nothing where there is none.
  void end(std::vector<Ended> ended);
  void fail_all(const std::string& message);

 private:
  mutable std::mutex mutex_;
  KeyMap<Entry> entries_;
};

}  // namespace qsgd
