// 2^bits levels from a bucket's least to its largest element, as QSGD-TF lays them out: a bucket
// has two scales, its least element and the distance of its levels.
#pragma once

#include "quant/codec.h"

namespace qsgd {

bool minmax_encode(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                   float* scales, uint8_t* code);
void minmax_decode(const float* scales, const uint8_t* code, size_t count, float* out);

}  // namespace qsgd
