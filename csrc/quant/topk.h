// The k elements of largest magnitude of a bucket, as they are: all their 16-bit places in rising
// order, then their float32 values. A last, shorter bucket keeps min(k, its size).
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/codec.h"

namespace qsgd {

// Codes one bucket. Of equal magnitudes the first are kept; NaN counts as the largest, so that it
// is seen. Returns whether all elements are finite.
bool topk_encode(const float* x, size_t count, const CodecSpec& spec, uint8_t* codes);

// Writes a bucket: zeros but for the elements kept. A place outside the bucket is ignored. Returns
// whether all values are finite.
bool topk_decode(const uint8_t* codes, size_t count, const CodecSpec& spec, float* out);

}  // namespace qsgd
