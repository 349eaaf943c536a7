// Control messages between rank 0 and the others, in frames of bounded size.
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
#include "transport/mailbox.h"
#include "transport/shared_node.h"
#include "transport/transport.h"

namespace qsgd {

enum class FrameType : uint8_t {
  kSubmissions,
  kKnown,
  kLeave,
  kResponses,
  kFarewell,
  kBlocked,
  kMeasure
};

class Messenger {
 public:
  using OnMessage = std::function<void(int peer, FrameType type, Reader body)>;

  // Rank 0 listens to all others, the others to rank 0. `node` may be null.
  Messenger(Transport& transport, SharedNode* node, OnMessage on_message);

  void send(int rank, FrameType type, const std::vector<char>& body);
  // Handles what has arrived; true when something had.
  bool progress();
  void flush();  // waits until all that MPI was given has left
  BytesGiven bytes_sent() const;

 private:
  struct Peer {
    int rank = 0;
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
    std::vector<char> bytes;
    RequestPtr request;
  };
  void join_mailboxes(Peer& peer);
  void listen(Peer& peer);
  void post(Peer& peer, FrameType type, const char* body, size_t size_bytes, bool more);
  bool hear(Peer& peer);
  void handle(Peer& peer, const std::vector<char>& frame);

  Transport& transport_;
  SharedNode* const node_;
  const Tag send_tag_;
  const Tag receive_tag_;
  const OnMessage on_message_;
  std::vector<std::unique_ptr<Peer>> peers_;  // of rank 0, all others in order; else rank 0
  std::list<Outgoing> outgoing_;
  std::vector<char> frame_;  // the one that is being sent
  std::atomic<uint64_t> sent_bytes_{0};
  std::atomic<uint64_t> mailed_bytes_{0};
};

}  // namespace qsgd
