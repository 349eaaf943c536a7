// Control messages between rank 0 and the others, in frames of bounded size.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "common/bytes.h"
#include "transport/transport.h"

namespace qsgd {

enum class FrameType : uint8_t { kSubmissions, kLeave, kResponses, kFarewell };

class Messenger {
 public:
  using OnFrame = std::function<void(int peer, FrameType type, Reader body)>;

  // Rank 0 listens to all others, the others to rank 0.
  Messenger(Transport& transport, OnFrame on_frame);

  // Sends items, each whole, in as few frames as hold them.
  void send(int peer, FrameType type, const std::vector<std::vector<char>>& items);
  // Handles what has arrived; true when something had.
  bool progress();
  void flush();  // waits until all that was sent has left

 private:
  struct Inbox {
    int peer;
    std::vector<char> buffer;
    RequestPtr request;
    bool open = true;
  };
  struct Outgoing {
    std::vector<char> bytes;
    RequestPtr request;
  };
  void listen(Inbox& inbox);
  void post(int peer, FrameType type, const Writer& body);

  Transport& transport_;
  const Tag send_tag_;
  const Tag receive_tag_;
  const OnFrame on_frame_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;
  std::list<Outgoing> outgoing_;
};

}  // namespace qsgd
