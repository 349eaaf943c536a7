// Table of codes, and the functions of codec.h.
#include "quant/code.h"

#include <array>

#include "common/clones.h"
#include "common/error.h"
#include "quant/kernels.h"

namespace qsgd {

#define QSGD_DECLARE(scheme, name) const Code& name##_code();
QSGD_CODES(QSGD_DECLARE)
#undef QSGD_DECLARE

namespace {

const auto& table() {
#define QSGD_ENTRY(scheme, name) &name##_code(),
  static const std::array codes{QSGD_CODES(QSGD_ENTRY)};
#undef QSGD_ENTRY
  return codes;
}

QSGD_CLONES
void rest_of(const float* value, size_t count, float* left) {
  for (size_t i = 0; i < count; ++i) {
    const float rest = value[i] - left[i];
    left[i] = magnitude_bits(rest) < kInfinity ? rest : 0.0f;
  }
}

}  // namespace

const Code& code_of(Scheme scheme) {
  const auto index = static_cast<size_t>(scheme);
  if (index >= table().size()) throw internal_error("scheme " + std::to_string(index) + " unknown");
  return *table()[index];
}

std::vector<std::string> code_names() {
  std::vector<std::string> names;
  for (const Code* code : table()) names.emplace_back(code->traits.name);
  return names;
}

Scheme parse_scheme(const std::string& name) {
  std::string known;
  for (size_t i = 0; i < table().size(); ++i) {
    if (name == table()[i]->traits.name) return static_cast<Scheme>(i);
    known += (known.empty() ? "" : ", ") + std::string(table()[i]->traits.name);
  }
  throw usage_error("unknown scheme '" + name + "'; known are " + known);
}

size_t Code::code_bytes(const CodecSpec& spec, size_t count) const {
  return tiles_of(count) * static_cast<size_t>(kTile / 8 * spec.bits);
}

double Code::mean_code_bytes(const CodecSpec& spec, size_t count) const {
  return static_cast<double>(code_bytes(spec, count));
}

void keep_rest(const float* value, size_t count, float* left) { rest_of(value, count, left); }

bool encode(const void* x, DType dtype, size_t count, uint64_t first, const CodecSpec& spec,
            const NoiseKey& key, float* scales, uint8_t* codes) {
  return code_of(spec.scheme).encode(x, dtype, count, first, spec, key, scales, codes);
}

bool encode_keeping(const void* x, DType dtype, float by, size_t count, uint64_t first,
                    const CodecSpec& spec, const NoiseKey& key, float* scales, uint8_t* codes,
                    float* left) {
  const Code& code = code_of(spec.scheme);
  return code.encode_keeping(x, dtype, by, count, first, spec, key, scales, codes, left);
}

bool decode(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
            void* out, DType dtype) {
  return code_of(spec.scheme).decode(scales, codes, count, spec, out, dtype);
}

void decode_add(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                float* sum) {
  code_of(spec.scheme).decode_add(scales, codes, count, spec, sum);
}

bool all_finite(const float* x, size_t count) {
  return kernels().max_magnitude(x, count) < kInfinity;
}

}  // namespace qsgd
