// Tensors in devices' memory while the processor works on them: copies in pinned memory.
#pragma once

#include <vector>

#include "engine/entries.h"

namespace qsgd {

// MPI may write to the copies until the collective is complete, so hold it in a KeptOnFailure.
class Staging {
 public:
  // Copies what entries in devices' memory read, and waits for that.
  explicit Staging(const std::vector<Entry*>& entries);
  Staging(Staging&&) = default;

  // The entries, with the copies in place of devices' memory.
  const std::vector<Entry*>& entries() const { return listed_; }
  // Copies what was written to the devices, and waits for that.
  void deliver();

 private:
  struct Copy {
    const Entry* entry;
    Entry host;
    gpu::Device::PinnedMemory in, out;
    gpu::Device& device() const { return entry->ready->device(); }
  };
  void settle();

  std::vector<Copy> copies_;
  std::vector<Entry*> listed_;
};

bool is_on_device(const Entry* entry);
// The device that has all of them; null where there is none.
gpu::Device* device_of(const std::vector<Entry*>& entries);

}  // namespace qsgd
