// Settings that may change during a job, on rank 0, which includes them in each response.
#pragma once

#include <cstddef>
#include <optional>

#include "collectives/allreduce.h"
#include "engine/segment_size.h"

namespace qsgd {

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
