// What may change while a job runs, on rank 0, which tells the others with each answer.
#pragma once

#include <cstddef>
#include <optional>

#include "collectives/allreduce.h"
#include "engine/segment_size.h"

namespace qsgd {

// What is not given stays as it is.
struct Tuning {
  std::optional<size_t> fusion_bytes;
  std::optional<double> cycle_time_s;
  std::optional<Algorithm> algorithm;  // of exact or of compressed reductions; others: auto
  std::optional<int> bits;             // of codes that have a choice; 32: none
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
inline bool can_tune_to(int bits) {
  return bits == 2 || bits == 4 || bits == 8 || bits == kPlainBits;
}

}  // namespace qsgd
