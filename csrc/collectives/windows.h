// A pipeline's messages to or from a peer: a few are in flight at a time, in buffers that are
// reused, so that a collective's memory does not grow with the tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/segments.h"
#include "transport/transport.h"

namespace qsgd {

// Messages per peer and direction: one is coded, one is in flight, and one waits.
constexpr size_t kWindow = 3;

// The buffers of one collective. MPI may write to them until the collective is complete, so hold
// this object in a KeptOnFailure.
class BufferPool {
 public:
  // Allocates memory for messages of tensors in this place; null: host memory.
  explicit BufferPool(Place* place = nullptr) : place_(place) {}
  uint8_t* take(size_t size_bytes);
  size_t size_bytes() const { return size_bytes_; }

 private:
  Place* place_;
  std::vector<std::shared_ptr<uint8_t>> buffers_;
  size_t size_bytes_ = 0;
};

// Messages from one peer, in order; receives for the next `depth` are posted.
class ReceiveWindow {
 public:
  ReceiveWindow(Transport& transport, int peer, Tag tag, Messages messages, BufferPool& pool,
                size_t depth = kWindow);
  ReceiveWindow(ReceiveWindow&&) = default;
  ReceiveWindow(const ReceiveWindow&) = delete;

  bool finished() const { return next_ == messages_.size(); }
  // The oldest message that was not released; null if it has not arrived.
  const uint8_t* ready();
  // Reuses the oldest message's buffer for a later one.
  void release();
  int peer() const { return peer_; }

 private:
  struct Slot {
    uint8_t* data;
    RequestPtr request;  // null once the message has arrived
  };
  void post(size_t message);

  Transport& transport_;
  const int peer_;
  const Tag tag_;
  const Messages messages_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
};

// Messages that are each sent to all of `peers`, with at most kWindow in flight. One in kWindow
// must be matched by the peer's receive before its buffer is reused, so that fewer than 2 kWindow
// ever wait there.
class SendWindow {
 public:
  SendWindow(Transport& transport, std::vector<int> peers, Tag tag, const Messages& messages,
             BufferPool& pool);
  SendWindow(SendWindow&&) = default;
  SendWindow(const SendWindow&) = delete;

  // Buffer for the next message; null while all buffers are in flight.
  uint8_t* slot();
  // Sends the message in the slot.
  void send(const Segment& segment);
  // The message number `index`, until its buffer is reused.
  const uint8_t* sent(size_t index) const { return slots_[index % slots_.size()].data; }
  size_t depth() const { return slots_.size(); }
  // Whether nothing is in flight. It tests each message with MPI, which costs time: call it last.
  bool drained();

 private:
  struct Slot {
    uint8_t* data;
    uint8_t* packed;  // null if no message is shorter on the wire
    std::vector<RequestPtr> requests;
    bool free();
  };
  Transport& transport_;
  std::vector<int> peers_;
  const Tag tag_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
};

}  // namespace qsgd
