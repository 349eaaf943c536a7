// One bit: an element's sign times the mean magnitude of its bucket, the scale that makes the error
// least. Karimireddy et al., Error feedback fixes signSGD, ICML 2019, section 4.
#pragma once

#include "quant/codec.h"

namespace qsgd {

bool sign_encode(const float* x, size_t count, float* scales, uint8_t* code);
void sign_decode(const float* scales, const uint8_t* code, size_t count, float* out);

}  // namespace qsgd
