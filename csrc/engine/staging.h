// Tensors in devices' memory while the processor works on them: copies in pinned memory.
#pragma once

#include <memory>
#include <vector>

#include "engine/entries.h"

namespace qsgd {

// Of one entry: it reads and writes the copy.
class HostCopy {
 public:
  // Begins to copy what the entry reads.
  explicit HostCopy(const Entry& entry);

  // The entry with the copy in place of the device's memory.
  Entry& host() { return host_; }
  // Begins to copy what was written to the device.
  void deliver();
  // Whether what was begun last is done; or waits until it is.
  bool has_landed() { return mark_->passed(); }
  void land() { device_.await(*mark_); }

 private:
  void* const target_;
  gpu::Device& device_;
  const gpu::Device::PinnedMemory in_, out_;
  Entry host_;
  std::shared_ptr<gpu::Mark> mark_;
};

// Of all entries of a response that need one. MPI may write to the copies until the collective is
// complete, so hold it in a KeptOnFailure.
class Staging {
 public:
  // Begins the copies that were not begun before.
  explicit Staging(const std::vector<Entry*>& entries);

  bool empty() const { return copies_.empty(); }
  // The entries, with the copies in place of devices' memory. Waits until they are there.
  const std::vector<Entry*>& entries();
  void deliver();
  bool has_landed();
  void land();

 private:
  std::vector<std::shared_ptr<HostCopy>> copies_;
  std::vector<Entry*> listed_;
};

// Whether the entry's tensor goes to the host in any case.
bool is_staged(const Entry& entry);
bool is_on_device(const Entry* entry);
// The device that has all of them; null where there is none.
gpu::Device* device_of(const std::vector<Entry*>& entries);

}  // namespace qsgd
