#include "collectives/windows.h"

#include <algorithm>

#include "collectives/packing.h"
#include "collectives/segment_coder.h"

namespace qsgd {

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
