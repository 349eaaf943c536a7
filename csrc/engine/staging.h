// Tensors in devices' memory while the processor works on them: copies in pinned memory.
#pragma once

#include <memory>
#include <vector>

#include "engine/entries.h"

namespace qsgd {

// MPI may write to the copies until the collective is complete, so hold it in a KeptOnFailure.
class Staging {
 public:
  // Begins to copy what entries in devices' memory read.
  explicit Staging(const std::vector<Entry*>& entries);

  // The entries, with the copies in place of devices' memory. Waits until they are there.
  const std::vector<Entry*>& entries();
  // Begins to copy what was written to the devices.
  void deliver();
  // Whether that is done; or waits until it is.
  bool has_landed();
  void land();

 private:
  struct Copy {
    const Entry* entry;
    Entry host;
    gpu::Device::PinnedMemory in, out;
    gpu::Device& device() const { return entry->ready->device(); }
  };
  void mark();

  std::vector<Copy> copies_;
  std::vector<Entry*> listed_;
  std::vector<std::shared_ptr<gpu::Mark>> marks_;  // of what was begun last, one for each device
};

bool is_on_device(const Entry* entry);
// The device that has all of them; null where there is none.
gpu::Device* device_of(const std::vector<Entry*>& entries);

}  // namespace qsgd
