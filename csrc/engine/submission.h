// What a rank asks for: one named operation on one tensor. Its facts must agree on every rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/reduce.h"
#include "common/bytes.h"
#include "quant/quantizer.h"

namespace qsgd {

enum class OpKind : uint8_t { kAllreduce, kBroadcast };

constexpr size_t kMaxName = 1024;  // bytes

struct Submission {
  std::string name;
  OpKind kind = OpKind::kAllreduce;
  std::vector<int64_t> shape;
  ReduceArgs args;   // dtype for both kinds; the rest for allreduce
  int32_t root = 0;  // for broadcast
  bool quantised = false;
  QuantSpec spec;             // when quantised
  bool check_finite = false;  // NaN or Inf in the result is an event to report

  size_t count() const;
  size_t size_bytes() const { return count() * facts(args.dtype).size; }
  void write(Writer& to) const;
  static Submission read(Reader& from);
};

// Empty when the two can be one operation; else what differs, with both values and the remedy.
std::string difference(int rank_a, const Submission& a, int rank_b, const Submission& b);

// True when both can travel in one fused reduction.
bool fusable(const Submission& a, const Submission& b);

}  // namespace qsgd
