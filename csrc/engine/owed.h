// What error feedback keeps of one tensor: on the host, or where a device codes with it.
#pragma once

#include <vector>

#include "gpu/device.h"

namespace qsgd {

class Owed {
 public:
  size_t size() const { return there_.data() != nullptr ? count_ : here_.size(); }
  bool empty() const { return size() == 0; }

  // Brings the values to the host, for good.
  std::vector<float>& on_host();
  // Brings them to the device, by the thread that drives the engine; null: to the host.
  float* on(gpu::Device* device);
  std::vector<float> values() const;
  void clear();

 private:
  std::vector<float> here_;
  gpu::DeviceMemory there_;  // if it has any, the values are there
  size_t count_ = 0;
};

}  // namespace qsgd
