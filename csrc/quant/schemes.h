// Codes of one small integer per element, besides QSGD's own uniform levels: what a bucket's
// elements become, before packing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/codec.h"

namespace qsgd {

// Codes one bucket. `noise` holds 16 uniform bits per element in whole tiles; it may be null where
// draws() is false. Writes the bucket's scales, and one code per element in whole tiles. Returns
// false when the bucket holds NaN or Inf; it then decodes to NaN.
bool scheme_encode(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                   float* scales, uint8_t* code);

// The values of a bucket's codes. Any code and any scale is safe: those that no encoder writes give
// some number.
void scheme_decode(const float* scales, const uint8_t* code, size_t count, const CodecSpec& spec,
                   float* out);

// Does encoding depend on the noise?
bool draws(const CodecSpec& spec);

}  // namespace qsgd
