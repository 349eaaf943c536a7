#include "engine/messenger.h"

#include <utility>

namespace qsgd {
namespace {

constexpr size_t kFrameBytes = 64 << 10;
constexpr size_t kFrameHeader = sizeof(uint32_t) + sizeof(FrameType) + sizeof(uint8_t);

}  // namespace

Messenger::Messenger(Transport& transport, OnMessage on_message)
    : transport_(transport),
      send_tag_(transport.rank() == 0 ? Tag::kResponse : Tag::kSubmit),
      receive_tag_(transport.rank() == 0 ? Tag::kSubmit : Tag::kResponse),
      on_message_(std::move(on_message)) {
  const int first = transport.rank() == 0 ? 1 : 0;
  const int last = transport.rank() == 0 ? transport.size() : 1;
  for (int peer = first; peer < last; ++peer) {
    inboxes_.push_back(std::make_unique<Inbox>());
    inboxes_.back()->peer = peer;
    inboxes_.back()->buffer.resize(kFrameBytes);
    listen(*inboxes_.back());
  }
}

void Messenger::listen(Inbox& inbox) {
  inbox.request =
      transport_.irecv(inbox.peer, receive_tag_, inbox.buffer.data(), inbox.buffer.size());
}

void Messenger::send(int peer, FrameType type, const std::vector<std::vector<char>>& items) {
  Writer body;
  for (const std::vector<char>& item : items) {
    if (kFrameHeader + item.size() > kFrameBytes) {
      throw internal_error("control message of " + std::to_string(item.size()) +
                           " bytes is larger than a frame");
    }
    if (kFrameHeader + body.bytes().size() + item.size() > kFrameBytes) {
      post(peer, type, body, /*more=*/true);
      body = Writer();
    }
    body.append(item);
  }
  post(peer, type, body, /*more=*/false);
}

void Messenger::post(int peer, FrameType type, const Writer& body, bool more) {
  Writer frame;
  frame.put(static_cast<uint32_t>(body.bytes().size()));
  frame.put(type);
  frame.put(static_cast<uint8_t>(more));
  frame.append(body.bytes());
  bytes_sent_.fetch_add(frame.bytes().size(), std::memory_order_relaxed);
  outgoing_.push_back({frame.bytes(), nullptr});
  Outgoing& sent = outgoing_.back();
  sent.request = transport_.isend(peer, send_tag_, sent.bytes.data(), sent.bytes.size());
}

bool Messenger::progress() {
  bool any = false;
  outgoing_.remove_if([](Outgoing& sent) { return sent.request->test(); });
  for (const auto& inbox : inboxes_) {
    while (inbox->open && inbox->request->test()) {
      any = true;
      Reader header(inbox->buffer.data(), inbox->buffer.size());
      const auto size = header.get<uint32_t>();
      const auto type = header.get<FrameType>();
      const bool more = header.get<uint8_t>() != 0;
      if (size > inbox->buffer.size() - kFrameHeader) {
        throw internal_error("control frame cut short");
      }
      const char* const body = inbox->buffer.data() + kFrameHeader;
      inbox->message.insert(inbox->message.end(), body, body + size);
      if (type == FrameType::kLeave || type == FrameType::kFarewell) inbox->open = false;
      if (inbox->open) listen(*inbox);
      if (more) continue;
      // Handled out of a place of its own, so that the next frame can arrive meanwhile.
      const std::vector<char> message = std::exchange(inbox->message, {});
      on_message_(inbox->peer, type, Reader(message.data(), message.size()));
    }
  }
  return any;
}

void Messenger::flush() {
  for (Outgoing& sent : outgoing_) transport_.wait(sent.request);
  outgoing_.clear();
}

}  // namespace qsgd
