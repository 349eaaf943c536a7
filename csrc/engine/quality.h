// Measured effect of compression on each tensor: cheap enough to be always on.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "collectives/reduce.h"
#include "quant/codec.h"

namespace qsgd {

struct TensorQuality {
  std::optional<CodecSpec> coding;  // current code
  size_t count = 0;
  double code_bits = 0;   // per element, without scales
  size_t wire_bytes = 0;  // of one coded copy, without headers
  double nmse = 0;        // of this rank's codes: last, and summed over `reductions`
  double nmse_sum = 0;
  uint64_t reductions = 0;
};

class QualityLog {
 public:
  void record(const std::string& name, const std::optional<CodecSpec>& coding, DType dtype,
              const ReduceTensor& tensor);
  double last_nmse(const std::string& name) const;  // 0 when unknown
  std::map<std::string, TensorQuality> all() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, TensorQuality> by_name_;
};

}  // namespace qsgd
