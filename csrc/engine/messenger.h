// Control messages between a rank and its parent and children, in frames of bounded size.
//
// A message is handled when all its frames are here. What it asks for may go through shared memory,
// and a rank that waits there takes no further frame: if it began with the first, the sender could
// never deliver the last, nor take part.
//
// Ranks of one node use mailboxes in memory they share, and MPI for frames that find no room there;
// frames are numbered, so that the receiver takes them in order whichever way they come.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/bytes.h"
#include "engine/tree.h"
#include "transport/mailbox.h"
#include "transport/shared_node.h"
#include "transport/transport.h"

namespace qsgd {

enum class FrameType : uint8_t {
  // Up:
  kSubmissions,      // that all below, and the sender, are ready for
  kKnown,            // the same, by numbers
  kSomeSubmissions,  // that the ranks named first are ready for
  kSomeKnown,        // the same, by numbers
  kLeave,
  kBlocked,
  // Down:
  kResponses,
  kFarewell,
  kMeasure,
  kTell,   // of these operations, who is ready
  kApart,  // of all that comes, as it comes
};

class Messenger {
 public:
  // `child` is that which it comes from, the first being 0; -1: it comes from the parent.
  using OnMessage = std::function<void(int child, FrameType type, Reader body)>;
  static constexpr int kParent = -1;

  // `node` may be null.
  Messenger(Transport& transport, SharedNode* node, const Tree& tree, OnMessage on_message);

  // To a child or the parent; nothing may follow the last.
  void send(int child, FrameType type, const std::vector<char>& body, bool last = false);
  // Handles what has arrived, of the parent's no more than one frame: what it asks for comes before
  // the next. True when something had.
  bool progress();
  void flush();  // waits until all that MPI was given has left
  // Until what was for children has: the parent may take what it was sent only after this rank has
  // taken part in what comes next.
  void flush_down();
  BytesGiven bytes_sent() const;
  uint64_t heard() const { return heard_.load(std::memory_order_relaxed); }  // messages

 private:
  struct Header {
    uint32_t size_bytes;  // of what follows
    uint32_t number;      // of the frame
    FrameType type;
    bool more;  // frames of the same message
    bool last;  // MPI brings it, whose receive would else be left over
  };
  struct Peer {
    int rank = 0;
    int child = kParent;
    bool is_parent() const { return child == kParent; }
    std::optional<Outbox> outbox;
    std::optional<Inbox> inbox;
    uint32_t sent = 0;   // frames
    uint32_t heard = 0;  // frames, in their order
    std::vector<char> mail;
    bool has_mail = false;  // that is still to be handled
    std::vector<char> buffer;
    RequestPtr request;
    bool arrived = false;  // in the buffer, and still to be handled
    unsigned looks = 0;
    std::vector<char> message;  // of the frames that came
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
  bool hear(Peer& peer);
  static Header header_of(const std::vector<char>& frame);
  void handle(Peer& peer, const std::vector<char>& frame);

  Transport& transport_;
  SharedNode* const node_;
  const OnMessage on_message_;
  std::vector<std::unique_ptr<Peer>> peers_;  // the parent, then the children
  size_t first_child_ = 0;
  std::list<Outgoing> outgoing_;
  std::vector<char> frame_;  // the one that is being sent
  std::atomic<uint64_t> sent_bytes_{0};
  std::atomic<uint64_t> mailed_bytes_{0};
  std::atomic<uint64_t> heard_{0};
};

}  // namespace qsgd
