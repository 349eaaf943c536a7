// Copies in pinned memory of tensors on devices, on which the host works.
#pragma once

#include <memory>
#include <vector>

#include "engine/entries.h"

namespace qsgd {

// Copy of one entry's tensor.
class HostCopy {
 public:
  // Starts copying the input from the device.
  explicit HostCopy(const Entry& entry);
  // An operation that fails before it is executed may still be copied: the memory is then kept.
  ~HostCopy();
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  // The entry with the copy instead of the device memory.
  Entry& host() { return host_; }
  // Starts copying the output to the device.
  void deliver();
  // has_landed(): whether the last copy has finished; land(): waits until it has.
  bool has_landed() { return mark_->passed(); }
  void land() { device_.await(*mark_); }

 private:
  void* const target_;
  gpu::Device& device_;
  const gpu::Device::PinnedMemory in_, out_;
  Entry host_;
  std::shared_ptr<gpu::Mark> mark_;
};

// Copies of all entries of a response that need one. MPI may write to the copies until the
// collective has finished, so hold this object in a KeptOnFailure.
class Staging {
 public:
  // Starts the copies that were not started before.
  explicit Staging(const std::vector<Entry*>& entries);

  // The entries, with copies instead of device memory. Waits until the copies have arrived.
  const std::vector<Entry*>& entries();
  void deliver();
  bool has_landed();

 private:
  std::vector<std::shared_ptr<HostCopy>> copies_;
  std::vector<Entry*> listed_;
};

// Whether the entry's tensor is copied to the host in any case.
bool is_staged(const Entry& entry);
bool is_on_device(const Entry* entry);
// The device of all entries; null if they have no common one.
gpu::Device* device_of(const std::vector<Entry*>& entries);

}  // namespace qsgd
