// Messages of codes whose length varies travel without what their slots leave unused. In memory
// every bucket has a slot as long as its longest code, so that any block of a message can be found;
// a slot begins with the number of bytes that are used behind it (kVaries in code.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/segments.h"

namespace qsgd {

// Whether a message is shorter on the wire than in memory.
bool packs(const Segment& segment);

// Writes the message as it travels; returns its length, at most segment.bytes.
size_t pack(const Segment& segment, const uint8_t* message, uint8_t* to);

// Turns what pack() wrote, of rank `sender`, back in place, in a buffer of segment.bytes. Throws
// where the lengths cannot be; damage elsewhere is for the checksum.
void unpack(const Segment& segment, uint8_t* message, int sender);

}  // namespace qsgd
