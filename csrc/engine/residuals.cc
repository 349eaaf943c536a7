#include "engine/residuals.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collectives/hierarchical.h"

namespace qsgd {
namespace {

constexpr size_t kManyNames = 1 << 14;  // more than models have

}  // namespace

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

Residuals::Covered Residuals::covered(size_t count, uint32_t bucket, uint32_t id,
                                      int owners) const {
  if (owners <= 0) return {{0, count}, communicator_.transport.size()};
  const SharedNode& node = *communicator_.node;
  return {hierarchical_shard(node, owners, count, bucket, id),
          static_cast<int>(node.nodes().size())};
}

Range Residuals::coded_sums(size_t count, uint32_t bucket, uint32_t id, int owners) const {
  if (owners > 0) return hierarchical_owned(*communicator_.node, owners, count, bucket, id);
  if (owners == kNoSums) return {};
  return owned(count, bucket, id, communicator_.transport.size(), rank());
}

std::vector<float> Residuals::attach(const std::string& name, uint32_t bucket, double scale,
                                     int owners, gpu::Device* device, ReduceTensor& tensor) {
  auto it = by_name_.find(name);
  if (it != by_name_.end() && !fits(name, it->second, tensor.count)) {
    by_name_.erase(it);
    it = by_name_.end();
  }
  Residual& residual = it == by_name_.end() ? by_name_[name] : it->second;
  if (it == by_name_.end() && by_name_.size() == kManyNames) warn_of_many(name);
  if (residual.worker.size() != tensor.count) residual.worker.on_host().resize(tensor.count);
  std::vector<float> beyond;
  // Another bucket or algorithm partitions the tensor differently; another scale changes the units.
  if (residual.bucket != bucket || residual.scale != scale || residual.owners != owners ||
      !residual.restored.empty()) {
    gather(residual, scale, bucket, tensor.id, owners);
    if (scale != 0) beyond = take_beyond(residual, bucket, tensor.id, owners);
  }
  residual.id = tensor.id;
  residual.bucket = bucket;
  residual.scale = scale;
  residual.owners = owners;
  const Range mine = coded_sums(tensor.count, bucket, tensor.id, owners);
  if (residual.owner.size() != mine.size()) move_to_owner(residual, mine);
  tensor.residual = residual.worker.on(device);
  tensor.owner_residual = residual.owner.on(device);
  return beyond;
}

std::vector<float> Residuals::take_beyond(Residual& residual, uint32_t bucket, uint32_t id,
                                          int owners) const {
  float* const worker = residual.worker.on_host().data();
  const size_t count = residual.worker.size();
  const Covered mine = covered(count, bucket, id, owners);
  const Range coded = mine.ranks > 1 ? mine.range : Range{};
  const auto owed = [](float x) { return x != 0; };
  if (std::none_of(worker, worker + coded.begin, owed) &&
      std::none_of(worker + coded.end, worker + count, owed)) {
    return {};
  }
  std::vector<float> beyond(count);
  std::swap_ranges(worker, worker + coded.begin, beyond.data());
  std::swap_ranges(worker + coded.end, worker + count, beyond.data() + coded.end);
  return beyond;
}

// In the sums that this rank codes, its own input is not coded. The residual of these elements
// therefore moves to the owner's residual.
void Residuals::move_to_owner(Residual& residual, const Range& mine) {
  std::vector<float>& owner = residual.owner.on_host();
  std::vector<float>& worker = residual.worker.on_host();
  owner.resize(mine.size());
  if (residual.scale == 0) return;  // no input reaches the result
  for (size_t i = 0; i < mine.size(); ++i) {
    owner[i] = static_cast<float>(worker[mine.begin + i] * residual.scale);
    worker[mine.begin + i] = 0;
  }
}

// The residual of a name that is never used again stays in memory.
void Residuals::warn_of_many(const std::string& name) const {
  if (!log_ || rank() != 0) return;
  log_("error feedback is kept for " + std::to_string(kManyNames) + " tensors, '" + name +
       "' the latest; if their names are new in every step, give each tensor a fixed name, "
       "or none, for which nothing is kept");
}

std::vector<float> Residuals::take(const std::string& name, double scale,
                                   const ReduceTensor& tensor) {
  const auto it = by_name_.find(name);
  if (it == by_name_.end()) return {};
  Residual residual = std::move(it->second);
  by_name_.erase(it);
  if (!fits(name, residual, tensor.count)) return {};
  gather(residual, scale, 1, tensor.id, 0);  // any partition: all elements of all ranks are added
  return std::move(residual.worker.on_host());
}

bool Residuals::fits(const std::string& name, const Residual& residual, size_t count) {
  if (residual.count() == count) return true;
  if (log_ && misfits_.insert(name).second) {
    log_("rank " + std::to_string(rank()) + ": tensor '" + name + "' now has " +
         std::to_string(count) + " elements, its error feedback was kept for " +
         std::to_string(residual.count()) + "; it is dropped. Give tensors of different " +
         "shapes names of their own");
  }
  return false;
}

void Residuals::gather(Residual& residual, double scale, uint32_t bucket, uint32_t id,
                       int owners) const {
  const size_t count = residual.count();
  std::vector<float>& worker = residual.worker.on_host();
  if (scale != 0) {  // else no input reaches the result
    for (float& x : worker) x *= static_cast<float>(residual.scale / scale);
    worker.resize(count);
    if (!residual.owner.empty()) {
      const std::vector<float>& owner = residual.owner.on_host();
      const Range range = coded_sums(count, residual.bucket, residual.id, residual.owners);
      for (size_t i = 0; i < range.size(); ++i) {
        worker[range.begin + i] += static_cast<float>(owner[i] / scale);
      }
    }
    const Covered mine = covered(residual.restored.size(), bucket, id, owners);
    for (size_t i = mine.range.begin; i < mine.range.end; ++i) {
      worker[i] += static_cast<float>(residual.restored[i] / scale / mine.ranks);
    }
  }
  worker.resize(count);
  residual.owner.clear();
  residual.restored.clear();
}

std::map<std::string, size_t> Residuals::counts() const {
  std::map<std::string, size_t> counts;
  for (const auto& [name, residual] : by_name_) counts[name] = residual.count();
  return counts;
}

std::vector<float> Residuals::share(const std::string& name) const {
  const auto it = by_name_.find(name);
  if (it == by_name_.end()) return {};
  const Residual& residual = it->second;
  std::vector<float> share(residual.count());
  const std::vector<float> worker = residual.worker.values();
  for (size_t i = 0; i < worker.size(); ++i) {
    share[i] = static_cast<float>(worker[i] * residual.scale);
  }
  if (!residual.owner.empty()) {
    const std::vector<float> owner = residual.owner.values();
    const Range range = coded_sums(share.size(), residual.bucket, residual.id, residual.owners);
    for (size_t i = 0; i < range.size(); ++i) share[range.begin + i] += owner[i];
  }
  if (rank() == 0) {
    for (size_t i = 0; i < residual.restored.size(); ++i) share[i] += residual.restored[i];
  }
  return share;
}

void Residuals::restore(std::map<std::string, std::vector<float>> owed) {
  by_name_.clear();
  for (auto& [name, values] : owed) by_name_[name].restored = std::move(values);
}

}  // namespace qsgd
