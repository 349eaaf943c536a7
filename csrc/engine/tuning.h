// Settings that may change during a job, on rank 0, which includes them in each response.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "collectives/allreduce.h"
#include "common/error.h"

namespace qsgd {

// Number of elements per message of a compressed reduction, sent as one byte.
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

// An empty value leaves the setting unchanged.
struct Tuning {
  std::optional<size_t> fusion_bytes;
  std::optional<double> cycle_time_s;  // time that rank 0 waits for more tensors to fuse
  std::optional<Algorithm> algorithm;  // for exact or compressed reductions; others use auto
  std::optional<int> bits;             // for codes with a choice of bits; 32: none
  std::optional<SegmentSize> segment;  // of messages of compressed reductions

  void update(const Tuning& by) {
    if (by.fusion_bytes) fusion_bytes = by.fusion_bytes;
    if (by.cycle_time_s) cycle_time_s = by.cycle_time_s;
    if (by.algorithm) algorithm = by.algorithm;
    if (by.bits) bits = by.bits;
    if (by.segment) segment = by.segment;
  }
};

constexpr int kPlainBits = 32;

}  // namespace qsgd
