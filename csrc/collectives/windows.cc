#include "collectives/windows.h"

#include <algorithm>

namespace qsgd {

uint8_t* BufferPool::take(size_t size_bytes) {
  size_bytes_ += size_bytes;
  buffers_.emplace_back(size_bytes);
  return buffers_.back().data();
}

ReceiveWindow::ReceiveWindow(Transport& transport, int peer, Tag tag, std::vector<size_t> sizes,
                             size_t depth, BufferPool& pool)
    : transport_(transport), peer_(peer), tag_(tag), sizes_(std::move(sizes)) {
  if (sizes_.empty()) return;
  const size_t largest = *std::max_element(sizes_.begin(), sizes_.end());
  for (size_t i = 0; i < std::min(depth, sizes_.size()); ++i) {
    slots_.push_back({pool.take(largest), nullptr});
    post(i);
  }
}

void ReceiveWindow::post(size_t message) {
  Slot& slot = slots_[message % slots_.size()];
  slot.request = transport_.irecv(peer_, tag_, slot.data, sizes_[message]);
}

const uint8_t* ReceiveWindow::ready() {
  if (finished()) return nullptr;
  Slot& slot = slots_[next_ % slots_.size()];
  if (slot.request != nullptr) {
    if (!slot.request->test()) return nullptr;
    slot.request = nullptr;
  }
  return slot.data;
}

void ReceiveWindow::release() {
  const size_t later = next_ + slots_.size();
  if (later < sizes_.size()) post(later);
  ++next_;
}

SendWindow::SendWindow(Transport& transport, std::vector<int> peers, Tag tag, size_t largest_bytes,
                       size_t depth, BufferPool& pool)
    : transport_(transport), peers_(std::move(peers)), tag_(tag) {
  for (size_t i = 0; i < depth; ++i) slots_.push_back({pool.take(largest_bytes), {}});
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

void SendWindow::send(size_t size_bytes) {
  const size_t place = next_++ % slots_.size();
  const Completion completion = place + 1 == slots_.size() ? Completion::kAsked : Completion::kSent;
  Slot& slot = slots_[place];
  for (const int peer : peers_) {
    slot.requests.push_back(transport_.isend(peer, tag_, slot.data, size_bytes, completion));
  }
}

bool SendWindow::drained() {
  bool all = true;
  for (Slot& slot : slots_) all &= slot.free();
  return all;
}

}  // namespace qsgd
