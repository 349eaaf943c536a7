#include "engine/staging.h"

#include <algorithm>

#include "common/error.h"

namespace qsgd {

bool is_on_device(const Entry* entry) { return entry->device() != nullptr; }

bool is_staged(const Entry& entry) { return is_on_device(&entry) && !entry.operation->coding; }

gpu::Device* device_of(const std::vector<Entry*>& entries) {
  gpu::Device* device = nullptr;
  for (const Entry* entry : entries) {
    if (device != nullptr && device != entry->device()) return nullptr;
    device = entry->device();
    if (device == nullptr) return nullptr;
  }
  return device;
}

HostCopy::HostCopy(const Entry& entry)
    : target_(entry.out),
      device_(*entry.device()),
      in_(device_.take_pinned(entry.operation->size_bytes())),
      out_(entry.out == nullptr    ? nullptr
           : entry.out == entry.in ? in_
                                   : device_.take_pinned(entry.operation->size_bytes())),
      host_(entry) {
  host_.in = in_.get();
  host_.out = out_.get();
  host_.ready = nullptr;
  host_.copied_from = &device_;
  const gpu::Device::Use here(device_);
  device_.copy(in_.get(), entry.in, entry.operation->size_bytes());
  mark_ = device_.mark(device_.stream());
}

HostCopy::~HostCopy() {
  try {
    if (mark_->passed()) return;
  } catch (const Error&) {  // the device has failed
  }
  device_.keep(in_);
  device_.keep(out_);
}

void HostCopy::deliver() {
  if (target_ == nullptr) return;
  const gpu::Device::Use here(device_);
  device_.copy(target_, out_.get(), host_.operation->size_bytes());
  mark_ = device_.mark(device_.stream());
}

Staging::Staging(const std::vector<Entry*>& entries) : listed_(entries) {
  for (Entry*& listed : listed_) {
    if (!is_on_device(listed)) continue;
    if (listed->copy == nullptr) listed->copy = std::make_shared<HostCopy>(*listed);
    copies_.push_back(listed->copy);
    listed = &listed->copy->host();
  }
}

const std::vector<Entry*>& Staging::entries() {
  for (const auto& copy : copies_) copy->land();
  return listed_;
}

void Staging::deliver() {
  for (const auto& copy : copies_) copy->deliver();
}

bool Staging::has_landed() {
  return std::all_of(copies_.begin(), copies_.end(), [](auto& copy) { return copy->has_landed(); });
}

}  // namespace qsgd
