// One tensor as one message, for arrays that do not fit a cache: coded, hashed and written, or
// read, checked and decoded, in one pass over memory, by any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/workers.h"
#include "quant/codec.h"

namespace qsgd {

// Bytes of the message: header, scales, codes.
size_t message_bytes(size_t count, const CodecSpec& spec);

// Writes the message of x[0..count); with `left`, as encode_keeping() does. Returns whether all
// elements were finite. The bytes are the same for any number of threads, and those of encode() and
// seal().
bool encode_message(const void* x, DType dtype, size_t count, const CodecSpec& spec,
                    const NoiseKey& key, uint8_t* message, Workers& workers, float by = 1,
                    float* left = nullptr);

// Checks the message as verify() does, and writes its values on the way, or adds them to `out`,
// which is float32 then. When it throws for the checksum, the last thing that it looks at, `out` is
// spoilt.
void decode_message(const uint8_t* message, size_t size, size_t count, const CodecSpec& spec,
                    void* out, DType dtype, bool add, Workers& workers);

}  // namespace qsgd
