#include "engine/messenger.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace qsgd {
namespace {

struct Header {
  uint32_t size_bytes;  // of what follows
  uint32_t number;      // of the frame
  FrameType type;
  bool more;  // frames of the same message
};

constexpr size_t kFrameBytes = 64 << 10;
constexpr size_t kMostBody = kFrameBytes - sizeof(Header);
// MPI brings little to a rank that has a mailbox, and each look costs.
constexpr unsigned kLooks = 16;

Header header_of(const std::vector<char>& frame) {
  Header header;
  std::memcpy(&header, frame.data(), sizeof header);
  if (header.size_bytes > frame.size() - sizeof header) {
    throw internal_error("control frame cut short");
  }
  return header;
}

// After it the sender sends nothing more. MPI brings it, whose receive would else be left over.
bool is_last(FrameType type) { return type == FrameType::kLeave || type == FrameType::kFarewell; }

}  // namespace

Messenger::Messenger(Transport& transport, SharedNode* node, OnMessage on_message)
    : transport_(transport),
      node_(node),
      send_tag_(transport.rank() == 0 ? Tag::kResponse : Tag::kSubmit),
      receive_tag_(transport.rank() == 0 ? Tag::kSubmit : Tag::kResponse),
      on_message_(std::move(on_message)) {
  const int first = transport.rank() == 0 ? 1 : 0;
  const int last = transport.rank() == 0 ? transport.size() : 1;
  for (int rank = first; rank < last; ++rank) {
    peers_.push_back(std::make_unique<Peer>());
    Peer& peer = *peers_.back();
    peer.rank = rank;
    peer.buffer.resize(kFrameBytes);
    if (node_ != nullptr && node_->is_near(rank)) join_mailboxes(peer);
    listen(peer);
  }
}

void Messenger::join_mailboxes(Peer& peer) {
  const bool first = transport_.rank() == 0;
  const int owner = first ? peer.rank : transport_.rank();
  void* const up = node_->mailbox(owner, SharedNode::Mail::kToFirst);
  void* const down = node_->mailbox(owner, SharedNode::Mail::kFromFirst);
  peer.outbox.emplace(first ? down : up);
  peer.inbox.emplace(first ? up : down);
}

void Messenger::listen(Peer& peer) {
  peer.arrived = false;
  peer.request = transport_.irecv(peer.rank, receive_tag_, peer.buffer.data(), peer.buffer.size());
}

void Messenger::send(int rank, FrameType type, const std::vector<char>& body) {
  Peer& peer = *peers_.at(static_cast<size_t>(transport_.rank() == 0 ? rank - 1 : rank));
  size_t at = 0;
  do {
    const size_t part = std::min(body.size() - at, kMostBody);
    post(peer, type, body.data() + at, part, at + part < body.size());
    at += part;
  } while (at < body.size());
}

void Messenger::post(Peer& peer, FrameType type, const char* body, size_t size_bytes, bool more) {
  const Header header{static_cast<uint32_t>(size_bytes), peer.sent++, type, more};
  const size_t frame_bytes = sizeof header + size_bytes;
  std::vector<char>& frame = frame_;
  frame.resize(frame_bytes);
  std::memcpy(frame.data(), &header, sizeof header);
  if (size_bytes > 0) std::memcpy(frame.data() + sizeof header, body, size_bytes);
  if (peer.outbox && !is_last(type) && peer.outbox->put(frame)) {
    mailed_bytes_.fetch_add(frame_bytes, std::memory_order_relaxed);
    return node_->count_given(frame_bytes);
  }
  sent_bytes_.fetch_add(frame_bytes, std::memory_order_relaxed);
  outgoing_.push_back({std::move(frame), nullptr});
  Outgoing& sent = outgoing_.back();
  sent.request = transport_.isend(peer.rank, send_tag_, sent.bytes.data(), sent.bytes.size());
}

bool Messenger::progress() {
  bool any = false;
  outgoing_.remove_if([](Outgoing& sent) { return sent.request->test(); });
  for (const auto& peer : peers_) {
    while (peer->open && hear(*peer)) any = true;
  }
  return any;
}

// Handles the next frame, whichever way it comes; false while it is not here.
bool Messenger::hear(Peer& peer) {
  if (peer.inbox && !peer.has_mail) peer.has_mail = peer.inbox->take(peer.mail);
  if (peer.has_mail && header_of(peer.mail).number == peer.heard) {
    peer.has_mail = false;
    handle(peer, peer.mail);
    return true;
  }
  const bool looks = !peer.inbox || peer.has_mail || ++peer.looks % kLooks == 0;
  if (!peer.arrived && looks) peer.arrived = peer.request->test();
  if (!peer.arrived || header_of(peer.buffer).number != peer.heard) return false;
  // Out of a place of its own, so that the next frame can arrive meanwhile.
  const Header header = header_of(peer.buffer);
  const std::vector<char> frame(peer.buffer.begin(),
                                peer.buffer.begin() + sizeof header + header.size_bytes);
  if (!is_last(header.type)) listen(peer);
  handle(peer, frame);
  return true;
}

void Messenger::handle(Peer& peer, const std::vector<char>& frame) {
  const Header header = header_of(frame);
  ++peer.heard;
  peer.open = !is_last(header.type);
  const char* const body = frame.data() + sizeof header;
  if (!header.more && peer.message.empty()) {
    return on_message_(peer.rank, header.type, Reader(body, header.size_bytes));
  }
  peer.message.insert(peer.message.end(), body, body + header.size_bytes);
  if (header.more) return;
  const std::vector<char> message = std::exchange(peer.message, {});
  on_message_(peer.rank, header.type, Reader(message.data(), message.size()));
}

void Messenger::flush() {
  for (Outgoing& sent : outgoing_) transport_.wait(sent.request);
  outgoing_.clear();
}

BytesGiven Messenger::bytes_sent() const {
  return {sent_bytes_.load(std::memory_order_relaxed),
          mailed_bytes_.load(std::memory_order_relaxed)};
}

}  // namespace qsgd
