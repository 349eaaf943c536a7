#include "engine/quality.h"

#include "quant/code.h"

namespace qsgd {
namespace {

// For variable-length codes: as measured in the last reduction.
double code_bits(const std::optional<CodecSpec>& coding, DType dtype, const ReduceTensor& tensor) {
  if (!coding) return 8.0 * static_cast<double>(facts(dtype).size);
  if (tensor.coded_count > 0) {
    return 8.0 * static_cast<double>(tensor.coded_bytes) / static_cast<double>(tensor.coded_count);
  }
  return 8.0 * coding->mean_code_bytes(coding->bucket) / coding->bucket;
}

size_t wire_bytes(const std::optional<CodecSpec>& coding, DType dtype, const ReduceTensor& tensor) {
  if (!coding) return tensor.count * facts(dtype).size;
  if (!traits_of(coding->scheme).has(kVaries)) return coding->bytes(tensor.count);
  const double codes = code_bits(coding, dtype, tensor) / 8 * static_cast<double>(tensor.count);
  return coding->scales(tensor.count) * sizeof(float) + static_cast<size_t>(codes);
}

}  // namespace

void QualityLog::record(const std::string& name, const std::optional<CodecSpec>& coding,
                        DType dtype, const ReduceTensor& tensor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TensorQuality& q = by_name_[name];
  q.coding = coding;
  q.count = tensor.count;
  q.code_bits = tensor.count > 0 ? code_bits(coding, dtype, tensor) : 0;
  q.wire_bytes = wire_bytes(coding, dtype, tensor);
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
