// Control messages between a rank and its parent and children, in frames of bounded size.
//
// A message is handled when all its frames have arrived. The operation that it starts may use
// shared memory, and a rank that waits there receives no frames: if it started with the first
// frame, the sender could neither deliver the last one nor take part.
//
// Ranks of one node use mailboxes in shared memory, and MPI for frames that do not fit. Frames are
// numbered, so the receiver handles them in order.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <optional>
#include <vector>

#include "common/bytes.h"
#include "engine/tree.h"
#include "transport/mailbox.h"
#include "transport/shared_node.h"
#include "transport/transport.h"

namespace qsgd {

enum class FrameType : uint8_t {
  // Up:
  kSubmissions,      // operations for which the sender and all ranks below it are ready
  kKnown,            // the same, as numbers
  kSomeSubmissions,  // operations for which the ranks listed first are ready
  kSomeKnown,        // the same, as numbers
  kLeave,
  kBlocked,
  // Down:
  kResponses,
  kFarewell,
  kMeasure,
  kQuery,     // asks which ranks are ready for these operations
  kUnmerged,  // asks for all reports unmerged from now on
};

class Messenger {
 public:
  // `child`: index of the child that has sent the message; kParent: the parent.
  using OnMessage = std::function<void(int child, FrameType type, Reader body)>;
  static constexpr int kParent = -1;

  // `node` may be null.
  Messenger(Transport& transport, SharedNode* node, const Tree& tree, OnMessage on_message);

  // Sends to a child or the parent; nothing may follow the last message.
  void send(int child, FrameType type, const std::vector<char>& body, bool last = false);
  // Handles messages that have arrived, but only one frame from the parent: its operations must be
  // executed before the next is read. Returns true if any was handled.
  bool progress();
  void flush();  // blocks until MPI has accepted all messages
  // The same for messages to children only: the parent may accept its messages only after this rank
  // has taken part in the next operation.
  void flush_down();
  BytesGiven bytes_sent() const;
  uint64_t messages_received() const { return received_.load(std::memory_order_relaxed); }

 private:
  struct Header {
    uint32_t size_bytes;  // of the body
    uint32_t number;      // number of the frame
    FrameType type;
    bool more;  // more frames of this message follow
    bool last;  // sent by MPI, so that no posted receive is left over
  };
  struct Peer {
    int rank = 0;
    int child = kParent;
    bool is_parent() const { return child == kParent; }
    std::optional<Outbox> outbox;
    std::optional<Inbox> inbox;
    uint32_t sent = 0;      // frames
    uint32_t received = 0;  // frames, in order
    std::vector<char> mail;
    bool has_mail = false;  // not yet handled
    std::vector<char> buffer;
    RequestPtr request;
    bool arrived = false;  // in the buffer, not yet handled
    unsigned checks = 0;
    std::vector<char> message;  // frames received so far
    bool open = true;
  };
  struct Outgoing {
    bool down;
    std::vector<char> bytes;
    RequestPtr request;
  };
  void add_peer(int rank, int child);
  void join_mailboxes(Peer& peer);
  void listen(Peer& peer);
  void post(Peer& peer, Header header, const char* body);
  bool receive(Peer& peer);
  static Header header_of(const std::vector<char>& frame);
  void handle(Peer& peer, const std::vector<char>& frame);

  Transport& transport_;
  SharedNode* const node_;
  const OnMessage on_message_;
  std::vector<Peer> peers_;  // the parent, then the children
  size_t first_child_ = 0;
  std::list<Outgoing> outgoing_;
  std::vector<char> frame_;  // the frame being sent
  std::atomic<uint64_t> sent_bytes_{0};
  std::atomic<uint64_t> mailed_bytes_{0};
  std::atomic<uint64_t> received_{0};
};

}  // namespace qsgd
