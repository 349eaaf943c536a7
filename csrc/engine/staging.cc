#include "engine/staging.h"

#include <algorithm>
#include <set>

namespace qsgd {

bool is_on_device(const Entry* entry) { return entry->ready != nullptr; }

gpu::Device* device_of(const std::vector<Entry*>& entries) {
  gpu::Device* device = nullptr;
  for (const Entry* entry : entries) {
    if (entry->ready == nullptr) return nullptr;
    if (device != nullptr && device != &entry->ready->device()) return nullptr;
    device = &entry->ready->device();
  }
  return device;
}

Staging::Staging(const std::vector<Entry*>& entries) : listed_(entries) {
  copies_.reserve(entries.size());
  for (Entry*& listed : listed_) {
    if (!is_on_device(listed)) continue;
    const Entry& entry = *listed;
    Copy& copy = copies_.emplace_back(Copy{&entry, entry, nullptr, nullptr});
    const size_t size_bytes = entry.operation->size_bytes();
    gpu::Device& device = copy.device();
    const gpu::Device::Use here(device);
    copy.in = device.take_pinned(size_bytes);
    device.copy(copy.in.get(), entry.in, size_bytes);
    copy.host.ready = nullptr;
    copy.host.in = copy.in.get();
    if (entry.out != nullptr) {
      copy.out = entry.out == entry.in ? copy.in : device.take_pinned(size_bytes);
      copy.host.out = copy.out.get();
    }
    listed = &copy.host;
  }
  mark();
}

const std::vector<Entry*>& Staging::entries() {
  land();
  return listed_;
}

void Staging::deliver() {
  for (const Copy& copy : copies_) {
    if (copy.out == nullptr) continue;
    const gpu::Device::Use here(copy.device());
    copy.device().copy(copy.entry->out, copy.out.get(), copy.entry->operation->size_bytes());
  }
  mark();
}

void Staging::mark() {
  std::set<gpu::Device*> devices;
  for (const Copy& copy : copies_) devices.insert(&copy.device());
  marks_.clear();
  for (gpu::Device* device : devices) marks_.push_back(device->mark(device->stream()));
}

bool Staging::has_landed() {
  return std::all_of(marks_.begin(), marks_.end(), [](auto& mark) { return mark->passed(); });
}

void Staging::land() {
  for (const auto& mark : marks_) mark->device().await(*mark);
}

}  // namespace qsgd
