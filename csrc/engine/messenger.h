// Control messages between rank 0 and the others, in frames of bounded size.
//
// A message is handled when all its frames are here. What it asks for may go through shared memory,
// and a rank that waits there takes no further frame: if it began with the first, the sender could
// never deliver the last, nor take part.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "common/bytes.h"
#include "transport/transport.h"

namespace qsgd {

enum class FrameType : uint8_t { kSubmissions, kKnown, kLeave, kResponses, kFarewell, kBlocked };

class Messenger {
 public:
  using OnMessage = std::function<void(int peer, FrameType type, Reader body)>;

  // Rank 0 listens to all others, the others to rank 0.
  Messenger(Transport& transport, OnMessage on_message);

  // Sends items as one message, each whole in a frame, in as few frames as hold them.
  void send(int peer, FrameType type, const std::vector<std::vector<char>>& items);
  // Handles what has arrived; true when something had.
  bool progress();
  void flush();  // waits until all that was sent has left
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }

 private:
  struct Inbox {
    int peer;
    std::vector<char> buffer;   // of the frame that is coming
    std::vector<char> message;  // of the frames that came
    RequestPtr request;
    bool open = true;
  };
  struct Outgoing {
    std::vector<char> bytes;
    RequestPtr request;
  };
  void listen(Inbox& inbox);
  void post(int peer, FrameType type, const Writer& body, bool more);

  Transport& transport_;
  const Tag send_tag_;
  const Tag receive_tag_;
  const OnMessage on_message_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;
  std::list<Outgoing> outgoing_;
  std::atomic<uint64_t> bytes_sent_{0};
};

}  // namespace qsgd
