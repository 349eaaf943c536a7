// Number of elements per message of a compressed reduction, sent as one byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/error.h"

namespace qsgd {

class SegmentSize {
 public:
  SegmentSize() = default;  // chosen by the size of the tensors
  // Throws a usage error unless `elements` is 0 (as above) or a power of two up to 2^30.
  explicit SegmentSize(size_t elements) {
    if (elements == 0) return;
    while (log2_ < kMostLog2 && (size_t{1} << log2_) < elements) ++log2_;
    if (elements == 1 || (size_t{1} << log2_) != elements) {
      throw usage_error("segments of " + std::to_string(elements) +
                        " elements: use a power of two up to 2^30, such as 65536, or 0 to let " +
                        "the size of the tensors decide");
    }
  }
  static SegmentSize of_log2(uint8_t log2) {
    SegmentSize size;
    size.log2_ = log2;
    return size;
  }

  size_t elements() const { return log2_ == 0 ? 0 : size_t{1} << log2_; }
  uint8_t log2() const { return log2_; }

 private:
  static constexpr uint8_t kMostLog2 = 30;
  uint8_t log2_ = 0;
};

}  // namespace qsgd
