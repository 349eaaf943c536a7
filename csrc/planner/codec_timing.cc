#include "planner/codec_timing.h"

#include <cmath>
#include <vector>

#include "collectives/reduce.h"
#include "planner/stopwatch.h"
#include "quant/codec.h"

namespace qsgd {
namespace {

constexpr size_t kElements = 1 << 20;
constexpr int kRepeats = 3;

class CodecRun {
 public:
  CodecRun(const CodecSpec& spec, Workers* workers)
      : spec_(spec),
        workers_(workers),
        part_(kMaxBucket / spec.bucket * spec.bucket),
        count_(kElements / part_ * part_),
        x_(count_),
        sum_(count_),
        scales_(spec.scales(count_)),
        codes_(spec.code_bytes(count_)) {
    for (size_t i = 0; i < count_; ++i) x_[i] = std::sin(static_cast<float>(i));
  }

  CodecCost cost() {
    const auto n = static_cast<double>(count_);
    return {spec_, seconds(&CodecRun::encode_part) / n, seconds(&CodecRun::decode_part) / n,
            seconds(&CodecRun::add_part) / n};
  }

 private:
  using Part = void (CodecRun::*)(size_t begin);

  double seconds(Part part) {
    const size_t tasks = count_ / part_;
    return median_s(kRepeats, [&] {
      const auto task = [&](size_t i) { (this->*part)(i * part_); };
      if (workers_ != nullptr) {
        workers_->run(tasks, task);
      } else {
        for (size_t i = 0; i < tasks; ++i) task(i);
      }
    });
  }

  void encode_part(size_t begin) {
    const NoiseKey key{0, 0, 0, 0, Phase::kScatter};
    encode(&x_[begin], DType::kFloat32, part_, begin, spec_, key, scales(begin), codes(begin));
  }
  void decode_part(size_t begin) {
    decode(scales(begin), codes(begin), part_, spec_, &sum_[begin], DType::kFloat32);
  }
  void add_part(size_t begin) {
    decode_add(scales(begin), codes(begin), part_, spec_, &sum_[begin]);
  }
  float* scales(size_t begin) { return scales_.data() + spec_.scales(begin); }
  uint8_t* codes(size_t begin) { return codes_.data() + spec_.code_bytes(begin); }

  const CodecSpec spec_;
  Workers* const workers_;
  const size_t part_;  // elements per task: complete buckets
  const size_t count_;
  std::vector<float> x_, sum_, scales_;
  std::vector<uint8_t> codes_;
};

}  // namespace

CodecCost time_codec(const CodecSpec& spec, Workers* workers) {
  return CodecRun(spec, workers).cost();
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
