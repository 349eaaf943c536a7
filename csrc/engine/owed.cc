#include "engine/owed.h"

#include <cstring>
#include <utility>

namespace qsgd {

std::vector<float> Owed::values() const {
  if (there_.data() == nullptr) return here_;
  gpu::Device& device = *there_.device();
  const gpu::Device::Use here(device);
  std::vector<float> values(count_);
  const auto copy = device.take_pinned(count_ * sizeof(float));
  device.copy(copy.get(), there_.data(), count_ * sizeof(float));
  device.synchronize();
  std::memcpy(values.data(), copy.get(), count_ * sizeof(float));
  return values;
}

std::vector<float>& Owed::on_host() {
  if (there_.data() != nullptr) {
    here_ = values();
    there_ = {};
  }
  return here_;
}

float* Owed::on(gpu::Device* device) {
  if (device == nullptr) return on_host().data();
  if (there_.data() != nullptr && there_.device() != device) on_host();
  if (there_.data() == nullptr && !here_.empty()) {
    count_ = here_.size();
    const size_t size_bytes = count_ * sizeof(float);
    gpu::DeviceMemory there(*device, size_bytes);
    auto copy = device->take_pinned(size_bytes);
    std::memcpy(copy.get(), here_.data(), size_bytes);
    device->copy(there.data(), copy.get(), size_bytes);
    device->keep(std::move(copy));
    there_ = std::move(there);
    here_ = {};
  }
  return reinterpret_cast<float*>(there_.data());
}

void Owed::clear() {
  here_.clear();
  there_ = {};
}

}  // namespace qsgd
