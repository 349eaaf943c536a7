// Messages of variable-length codes are sent without the unused parts of their slots. In memory,
// every bucket has a slot with the length of its longest code, so that any block of a message can
// be found. A slot begins with the number of used bytes that follow (kVaries in code.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/segments.h"

namespace qsgd {

// Whether a message is shorter on the wire than in memory.
bool packs(const Segment& segment);

// Writes the message as sent; returns its length, at most segment.bytes.
size_t pack(const Segment& segment, const uint8_t* message, uint8_t* to);

// Inverse of pack(), in place, in a buffer of segment.bytes; `sender` is for errors. Throws if the
// lengths are impossible; other damage is detected by the checksum.
void unpack(const Segment& segment, uint8_t* message, int sender);

}  // namespace qsgd
