// Error feedback's residual of one tensor: on the host, or on the device that codes it.
#pragma once

#include <vector>

#include "gpu/device.h"

namespace qsgd {

class Owed {
 public:
  size_t size() const { return there_.data() != nullptr ? count_ : here_.size(); }
  bool empty() const { return size() == 0; }

  // Moves the values to the host.
  std::vector<float>& on_host();
  // Moves the values to the device (null: to the host). Called by the thread that drives the
  // engine.
  float* on(gpu::Device* device);
  std::vector<float> values() const;
  void clear();

 private:
  std::vector<float> here_;
  gpu::DeviceMemory there_;  // if allocated, it has the values
  size_t count_ = 0;
};

}  // namespace qsgd
