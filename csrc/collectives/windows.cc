#include "collectives/windows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "collectives/segment_coder.h"
#include "quant/code.h"
#include "quant/wire.h"

namespace qsgd {
namespace {

// Messages of variable-length codes are sent without the unused parts of their slots. In memory,
// every bucket has a slot with the length of its longest code, so that any block of a message can
// be found. A slot begins with the number of used bytes that follow (kVaries in code.h).

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

// Whether a message is shorter on the wire than in memory.
bool packs(const Segment& segment) {
  return std::any_of(segment.pieces.begin(), segment.pieces.end(),
                     [](const Piece& piece) { return piece.slot_bytes != 0; });
}

// Writes the message as sent; returns its length, at most segment.bytes.
size_t pack(const Segment& segment, const uint8_t* message, uint8_t* to) {
  uint8_t* next = to;
  for_each_slot(segment, [&](size_t at, size_t size_bytes, bool varies) {
    const size_t used = varies ? sizeof(SlotLength) + used_bytes(message + at) : size_bytes;
    std::memcpy(next, message + at, used);
    next += used;
  });
  return static_cast<size_t>(next - to);
}

// Inverse of pack(), in place, in a buffer of segment.bytes; `sender` is for errors. Throws if the
// lengths are impossible; other damage is detected by the checksum.
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

}  // namespace

uint8_t* BufferPool::take(size_t size_bytes) {
  size_bytes_ += size_bytes;
  // Zeros, so that padding in messages does not leak old data.
  buffers_.push_back(
      place_ != nullptr
          ? place_->take_message(size_bytes)
          : std::shared_ptr<uint8_t>(new uint8_t[size_bytes](), std::default_delete<uint8_t[]>()));
  return buffers_.back().get();
}

ReceiveWindow::ReceiveWindow(Transport& transport, int peer, Tag tag, Messages messages,
                             BufferPool& pool, size_t depth)
    : transport_(transport), peer_(peer), tag_(tag), messages_(std::move(messages)) {
  const size_t largest = largest_message(messages_);
  for (size_t i = 0; i < std::min(depth, messages_.size()); ++i) {
    slots_.push_back({pool.take(largest), nullptr});
    post(i);
  }
}

void ReceiveWindow::post(size_t message) {
  Slot& slot = slots_[message % slots_.size()];
  slot.request = transport_.irecv(peer_, tag_, slot.data, messages_[message]->bytes);
}

const uint8_t* ReceiveWindow::ready() {
  if (finished()) return nullptr;
  Slot& slot = slots_[next_ % slots_.size()];
  if (slot.request != nullptr) {
    if (!slot.request->test()) return nullptr;
    slot.request = nullptr;
    const Segment& segment = *messages_[next_];
    if (packs(segment)) unpack(segment, slot.data, peer_);
  }
  return slot.data;
}

void ReceiveWindow::release() {
  const size_t later = next_ + slots_.size();
  if (later < messages_.size()) post(later);
  ++next_;
}

SendWindow::SendWindow(Transport& transport, std::vector<int> peers, Tag tag,
                       const Messages& messages, BufferPool& pool)
    : transport_(transport), peers_(std::move(peers)), tag_(tag) {
  const size_t largest = largest_message(messages);
  const bool any_packs = std::any_of(messages.begin(), messages.end(),
                                     [](const Segment* segment) { return packs(*segment); });
  for (size_t i = 0; i < std::min(kWindow, messages.size()); ++i) {
    slots_.push_back({pool.take(largest), any_packs ? pool.take(largest) : nullptr, {}});
  }
}

bool SendWindow::Slot::free() {
  requests.erase(std::remove_if(requests.begin(), requests.end(),
                                [](RequestPtr& request) { return request->test(); }),
                 requests.end());
  return requests.empty();
}

uint8_t* SendWindow::slot() {
  Slot& slot = slots_[next_ % slots_.size()];
  return slot.free() ? slot.data : nullptr;
}

void SendWindow::send(const Segment& segment) {
  const size_t place = next_++ % slots_.size();
  const Completion completion =
      place + 1 == slots_.size() ? Completion::kMatched : Completion::kSent;
  Slot& slot = slots_[place];
  const bool is_packed = packs(segment);
  const size_t size_bytes = is_packed ? pack(segment, slot.data, slot.packed) : segment.bytes;
  for (const int peer : peers_) {
    slot.requests.push_back(
        transport_.isend(peer, tag_, is_packed ? slot.packed : slot.data, size_bytes, completion));
  }
}

bool SendWindow::drained() {
  bool all = true;
  for (Slot& slot : slots_) all &= slot.free();
  return all;
}

}  // namespace qsgd
