// Runs of buckets of every code but QSGD's own: codec.cc sends them here. Arguments as in codec.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/codec.h"

namespace qsgd {

bool encode_run(const float* x, size_t count, uint64_t first, const CodecSpec& spec,
                const NoiseKey& key, float* scales, uint8_t* codes);
bool decode_run(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                float* out);
void decode_add_run(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                    float* sum);

}  // namespace qsgd
