// NUQSGD: levels 0, 2^-(s-1), ..., 1/2, 1 of the norm, denser near zero, where gradients are.
// Ramezani-Kebrya et al., NUQSGD: provably communication-efficient data-parallel SGD via nonuniform
// quantization, JMLR 2021.
#pragma once

#include "quant/codec.h"

namespace qsgd {

bool nuqsgd_encode(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                   float* scales, uint8_t* code);
void nuqsgd_decode(const float* scales, const uint8_t* code, size_t count, const CodecSpec& spec,
                   float* out);

}  // namespace qsgd
