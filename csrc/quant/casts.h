// Gradients as 16-bit floats, rounded to nearest, ties to even. Magnitudes beyond the range become
// Inf, as casts of numpy and torch do.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/codec.h"

namespace qsgd {

// `codes` holds two bytes per element and needs no alignment. Each returns whether all of the
// float32 values that it read or wrote are finite.
bool cast_encode(const float* x, size_t count, const CodecSpec& spec, uint8_t* codes);
bool cast_decode(const uint8_t* codes, size_t count, const CodecSpec& spec, float* out);

}  // namespace qsgd
