// One tensor as one message, for arrays larger than the caches: coded, hashed and written, or read,
// verified and decoded, in one pass over memory, by any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/workers.h"
#include "quant/codec.h"

namespace qsgd {

// Size of the message: header, scales, codes.
size_t message_bytes(size_t count, const CodecSpec& spec);

// Writes the message of x[0..count); with `left`, as encode_keeping() does. Returns whether all
// elements were finite. The bytes are the same for any number of threads, and equal those of
// encode() and seal().
bool encode_message(const void* x, DType dtype, size_t count, const CodecSpec& spec,
                    const NoiseKey& key, uint8_t* message, Workers& workers, float by = 1,
                    float* left = nullptr);

// Verifies the message as verify() does, and meanwhile writes its values, or adds them to `out`,
// which must then be float32. The checksum is verified last: if it is wrong, this throws, and `out`
// has been overwritten.
void decode_message(const uint8_t* message, size_t size, size_t count, const CodecSpec& spec,
                    void* out, DType dtype, bool add, Workers& workers);

}  // namespace qsgd
