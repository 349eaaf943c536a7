// Casts of gradients to 16-bit floats, rounded to nearest, ties to even. Magnitudes beyond the
// range become Inf, as in numpy and torch.
#include "quant/code.h"
#include "quant/kernels.h"

namespace qsgd {
namespace {

// Codes need no alignment.
class Cast final : public BucketCode {
 public:
  // `type`: index of the element type in Kernels::shorten and widen.
  constexpr Cast(const char* name, int type)
      : BucketCode({name, 16, 16, 0, kPlain, 16}), type_(type) {}

  size_t code_bytes(const CodecSpec& /*spec*/, size_t count) const override {
    return count * sizeof(uint16_t);
  }

 private:
  bool encode_bucket(const float* x, size_t count, uint64_t /*first*/, const CodecSpec& /*spec*/,
                     const NoiseKey& /*key*/, float* /*scales*/, uint8_t* codes,
                     Scratch& /*scratch*/) const override {
    return kernels().shorten[type_](x, count, codes) < kInfinity;
  }
  bool decode_bucket(const float* /*scales*/, const uint8_t* codes, size_t count,
                     const CodecSpec& /*spec*/, float* out, Scratch& /*scratch*/) const override {
    return kernels().widen[type_](codes, count, out) < kInfinity;
  }

  const int type_;
};

}  // namespace

const Code& float16_code() {
  static constexpr Cast code("float16", 0);
  return code;
}

const Code& bfloat16_code() {
  static constexpr Cast code("bfloat16", 1);
  return code;
}

}  // namespace qsgd
