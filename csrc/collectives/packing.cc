#include "collectives/packing.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "quant/code.h"
#include "quant/wire.h"

namespace qsgd {
namespace {

// Calls f(offset in memory, bytes of the slot, whether its length varies) for all parts of a
// message, in order.
template <class F>
void for_each_slot(const Segment& segment, const F& f) {
  f(0, segment.pieces.front().codes_at, false);
  for (const Piece& piece : segment.pieces) {
    if (piece.slot_bytes == 0) {
      f(piece.codes_at, piece.codes_bytes, false);
      continue;
    }
    for (size_t at = 0; at < piece.codes_bytes; at += piece.slot_bytes) {
      f(piece.codes_at + at, std::min(piece.slot_bytes, piece.codes_bytes - at), true);
    }
  }
}

}  // namespace

bool packs(const Segment& segment) {
  return std::any_of(segment.pieces.begin(), segment.pieces.end(),
                     [](const Piece& piece) { return piece.slot_bytes != 0; });
}

size_t pack(const Segment& segment, const uint8_t* message, uint8_t* to) {
  uint8_t* next = to;
  for_each_slot(segment, [&](size_t at, size_t size_bytes, bool varies) {
    const size_t used = varies ? sizeof(SlotLength) + used_bytes(message + at) : size_bytes;
    std::memcpy(next, message + at, used);
    next += used;
  });
  return static_cast<size_t>(next - to);
}

void unpack(const Segment& segment, uint8_t* message, int sender) {
  struct Part {
    size_t packed_at, at, used, size_bytes;
  };
  std::vector<Part> parts;
  size_t packed_at = 0;
  for_each_slot(segment, [&](size_t at, size_t size_bytes, bool varies) {
    size_t used = size_bytes;
    if (varies) {
      // Slots in memory never lie before their packed form, so this reads within the message.
      used = sizeof(SlotLength) + used_bytes(message + packed_at);
      if (used > size_bytes) {
        refuse("a bucket has " + std::to_string(used) + " bytes, at most " +
                   std::to_string(size_bytes) + " can be",
               sender);
      }
    }
    parts.push_back({packed_at, at, used, size_bytes});
    packed_at += used;
  });
  // Backwards, so that nothing is overwritten before it is moved.
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
    std::memmove(message + part->at, message + part->packed_at, part->used);
    std::memset(message + part->at + part->used, 0, part->size_bytes - part->used);
  }
}

}  // namespace qsgd
