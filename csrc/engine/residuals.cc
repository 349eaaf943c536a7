#include "engine/residuals.h"

#include <type_traits>

namespace qsgd {
namespace {

constexpr size_t kManyNames = 1 << 14;  // more than models have

void add(void* to, const void* in, DType dtype, const std::vector<float>& extra) {
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    for (size_t i = 0; i < extra.size(); ++i) {
      const auto value = static_cast<Wide>(static_cast<const T*>(in)[i]);
      static_cast<T*>(to)[i] = static_cast<T>(value + static_cast<Wide>(extra[i]));
    }
  });
}

}  // namespace

void Residuals::lend(const std::string& name, uint32_t bucket, double scale, int owners,
                     gpu::Device* device, ReduceTensor& tensor) {
  auto it = debts_.find(name);
  if (it != debts_.end() && !fits(name, it->second, tensor.count)) {
    debts_.erase(it);
    it = debts_.end();
  }
  Debt& debt = it == debts_.end() ? debts_[name] : it->second;
  if (it == debts_.end() && debts_.size() == kManyNames) warn_of_many(name);
  if (debt.worker.size() != tensor.count) debt.worker.on_host().resize(tensor.count);
  // Another bucket or algorithm partitions the tensor differently; another scale changes the units.
  if (debt.bucket != bucket || debt.scale != scale || debt.owners != owners ||
      !debt.restored.empty()) {
    gather(debt, scale, bucket, tensor.id, owners);
  }
  debt.id = tensor.id;
  debt.bucket = bucket;
  debt.scale = scale;
  debt.owners = owners;
  const Range mine = owned_(tensor.count, bucket, tensor.id, owners);
  if (debt.owner.size() != mine.size()) move_to_owner(debt, mine);
  tensor.residual = debt.worker.on(device);
  tensor.owner_residual = debt.owner.on(device);
}

// In the sums that this rank codes, its own input is not coded. The residual of these elements
// therefore moves to the owner's residual.
void Residuals::move_to_owner(Debt& debt, const Range& mine) {
  std::vector<float>& owner = debt.owner.on_host();
  std::vector<float>& worker = debt.worker.on_host();
  owner.resize(mine.size());
  if (debt.scale == 0) return;  // no input reaches the result
  for (size_t i = 0; i < mine.size(); ++i) {
    owner[i] = static_cast<float>(worker[mine.begin + i] * debt.scale);
    worker[mine.begin + i] = 0;
  }
}

// The residual of a name that is never used again stays in memory.
void Residuals::warn_of_many(const std::string& name) const {
  if (!log_ || rank_ != 0) return;
  log_("error feedback is kept for " + std::to_string(kManyNames) + " tensors, '" + name +
       "' the latest; if their names are new in every step, give each tensor a fixed name, "
       "or none, for which nothing is kept");
}

std::vector<char> Residuals::settle(const std::string& name, DType dtype, double scale,
                                    const ReduceTensor& tensor) {
  const auto it = debts_.find(name);
  if (it == debts_.end()) return {};
  Debt debt = std::move(it->second);
  debts_.erase(it);
  if (!facts(dtype).floating || !fits(name, debt, tensor.count)) return {};
  gather(debt, scale, 1, tensor.id, 0);  // any partition: all elements of all ranks are added
  std::vector<char> input(tensor.count * facts(dtype).size);
  add(input.data(), tensor.in, dtype, debt.worker.on_host());
  return input;
}

bool Residuals::fits(const std::string& name, const Debt& debt, size_t count) const {
  if (debt.count() == count) return true;
  if (log_) {
    log_("rank " + std::to_string(rank_) + ": tensor '" + name + "' now has " +
         std::to_string(count) + " elements, its error feedback was kept for " +
         std::to_string(debt.count()) + "; it is dropped. Give tensors of different " +
         "shapes names of their own");
  }
  return false;
}

void Residuals::gather(Debt& debt, double scale, uint32_t bucket, uint32_t id, int owners) const {
  const size_t count = debt.count();
  std::vector<float>& worker = debt.worker.on_host();
  if (scale != 0) {  // else no input reaches the result
    for (float& x : worker) x *= static_cast<float>(debt.scale / scale);
    worker.resize(count);
    if (!debt.owner.empty()) {
      const std::vector<float>& owner = debt.owner.on_host();
      const Range range = owned_(count, debt.bucket, debt.id, debt.owners);
      for (size_t i = 0; i < range.size(); ++i) {
        worker[range.begin + i] += static_cast<float>(owner[i] / scale);
      }
    }
    const Paid mine = pays_(debt.restored.size(), bucket, id, owners);
    for (size_t i = mine.range.begin; i < mine.range.end; ++i) {
      worker[i] += static_cast<float>(debt.restored[i] / scale / mine.payers);
    }
  }
  worker.resize(count);
  debt.owner.clear();
  debt.restored.clear();
}

std::map<std::string, size_t> Residuals::counts() const {
  std::map<std::string, size_t> counts;
  for (const auto& [name, debt] : debts_) counts[name] = debt.count();
  return counts;
}

std::vector<float> Residuals::share(const std::string& name) const {
  const auto it = debts_.find(name);
  if (it == debts_.end()) return {};
  const Debt& debt = it->second;
  std::vector<float> share(debt.count());
  const std::vector<float> worker = debt.worker.values();
  for (size_t i = 0; i < worker.size(); ++i) {
    share[i] = static_cast<float>(worker[i] * debt.scale);
  }
  if (!debt.owner.empty()) {
    const std::vector<float> owner = debt.owner.values();
    const Range range = owned_(share.size(), debt.bucket, debt.id, debt.owners);
    for (size_t i = 0; i < range.size(); ++i) share[range.begin + i] += owner[i];
  }
  if (rank_ == 0) {
    for (size_t i = 0; i < debt.restored.size(); ++i) share[i] += debt.restored[i];
  }
  return share;
}

void Residuals::restore(std::map<std::string, std::vector<float>> owed) {
  debts_.clear();
  for (auto& [name, values] : owed) debts_[name].restored = std::move(values);
}

}  // namespace qsgd
