#include "planner/codec_timing.h"

#include <cmath>
#include <vector>

#include "collectives/reduce.h"
#include "quant/codec.h"

namespace qsgd {
namespace {

constexpr size_t kElements = 1 << 20;
constexpr int kRepeats = 3;

}  // namespace

CodecCost time_codec(const CodecSpec& spec, Workers* workers) {
  const size_t part = kMaxBucket / spec.bucket * spec.bucket;  // elements per task
  const size_t count = kElements / part * part;
  std::vector<float> x(count), sum(count), scale(spec.scales(count));
  std::vector<uint8_t> code(spec.code_bytes(count));
  for (size_t i = 0; i < count; ++i) x[i] = std::sin(static_cast<float>(i));
  // Seconds per element of step(first element, its scales, its codes) on all parts.
  const auto seconds = [&](const auto& step) {
    const auto task = [&](size_t i) {
      const size_t at = i * part;
      step(at, scale.data() + spec.scales(at), code.data() + spec.code_bytes(at));
    };
    const double all_s = median_s(kRepeats, [&] {
      if (workers != nullptr) return workers->run(count / part, task);
      for (size_t i = 0; i < count / part; ++i) task(i);
    });
    return all_s / static_cast<double>(count);
  };
  const NoiseKey key{0, 0, 0, 0, Phase::kScatter};
  CodecCost cost;
  cost.spec = spec;
  cost.encode_s = seconds([&](size_t at, float* scales, uint8_t* codes) {
    encode(&x[at], DType::kFloat32, part, at, spec, key, scales, codes);
  });
  cost.decode_s = seconds([&](size_t at, const float* scales, const uint8_t* codes) {
    decode(scales, codes, part, spec, &sum[at], DType::kFloat32);
  });
  cost.decode_add_s = seconds([&](size_t at, const float* scales, const uint8_t* codes) {
    decode_add(scales, codes, part, spec, &sum[at]);
  });
  return cost;
}

double time_adding_s_per_byte() {
  const std::vector<float> from(kElements, 1.0f);
  std::vector<float> into(kElements, 0.0f);
  const double seconds = median_s(kRepeats, [&] {
    reduce_into(into.data(), from.data(), kElements, DType::kFloat32, ReduceOp::kSum);
  });
  return seconds / (kElements * sizeof(float));
}

}  // namespace qsgd
