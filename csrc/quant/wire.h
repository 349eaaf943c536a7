// What travels: header, then the norms of all buckets, then the codes of all buckets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/quantizer.h"

namespace qsgd {

struct WireHeader {
  uint32_t magic;
  uint8_t version;
  uint8_t bits;
  uint8_t norm;
  uint8_t reserved;
  uint32_t bucket;
  uint32_t pieces;
  uint64_t count;     // elements of all pieces
  uint64_t checksum;  // of everything behind the header
};
static_assert(sizeof(WireHeader) == 32);

// Hash of `size` bytes: any flipped bit changes it. Not for keeping secrets.
uint64_t checksum(const uint8_t* bytes, size_t size);

// Writes the header of a finished body.
void seal(uint8_t* message, size_t size, const QuantSpec& spec, size_t pieces, size_t count);

// Throws an error that says what differs when `message` is not what this rank expects to decode.
// `sender` names the rank in it.
void verify(const uint8_t* message, size_t size, const QuantSpec& spec, size_t pieces, size_t count,
            int sender);

}  // namespace qsgd
