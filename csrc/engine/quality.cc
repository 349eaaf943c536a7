#include "engine/quality.h"

namespace qsgd {

void QualityLog::record(const std::string& name, const std::optional<CodecSpec>& coding,
                        DType dtype, const ReduceTensor& tensor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TensorQuality& q = by_name_[name];
  q.coding = coding;
  q.count = tensor.count;
  q.wire_bytes = coding ? coding->bytes(tensor.count) : tensor.count * facts(dtype).size;
  q.nmse = tensor.coded_energy > 0 ? tensor.coding_error / tensor.coded_energy : 0;
  q.nmse_sum += q.nmse;
  ++q.reductions;
}

double QualityLog::last_nmse(const std::string& name) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? 0 : it->second.nmse;
}

std::map<std::string, TensorQuality> QualityLog::all() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return by_name_;
}

}  // namespace qsgd
