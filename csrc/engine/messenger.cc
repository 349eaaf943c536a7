#include "engine/messenger.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace qsgd {
namespace {

constexpr size_t kFrameBytes = 64 << 10;
// A rank with a mailbox gets few messages by MPI, and each test costs time.
constexpr unsigned kChecks = 16;

}  // namespace

Messenger::Header Messenger::header_of(const std::vector<char>& frame) {
  Header header;
  std::memcpy(&header, frame.data(), sizeof header);
  if (header.size_bytes > frame.size() - sizeof header) {
    throw internal_error("control frame cut short");
  }
  return header;
}

Messenger::Messenger(Transport& transport, SharedNode* node, const Tree& tree, OnMessage on_message)
    : transport_(transport), node_(node), on_message_(std::move(on_message)) {
  if (!tree.is_root()) add_peer(tree.parent(), kParent);
  first_child_ = peers_.size();
  int child = 0;
  for (const int rank : tree.children()) add_peer(rank, child++);
}

void Messenger::add_peer(int rank, int child) {
  Peer& peer = peers_.emplace_back();
  peer.rank = rank;
  peer.child = child;
  peer.buffer.resize(kFrameBytes);
  if (node_ != nullptr && node_->is_near(rank)) join_mailboxes(peer);
  listen(peer);
}

void Messenger::join_mailboxes(Peer& peer) {
  const bool leads = !peer.is_parent();
  const int owner = leads ? peer.rank : transport_.rank();
  void* const up = node_->mailbox(owner, SharedNode::Mail::kUp);
  void* const down = node_->mailbox(owner, SharedNode::Mail::kDown);
  peer.outbox.emplace(leads ? down : up);
  peer.inbox.emplace(leads ? up : down);
}

void Messenger::listen(Peer& peer) {
  const Tag tag = peer.is_parent() ? Tag::kResponse : Tag::kSubmit;
  peer.arrived = false;
  peer.request = transport_.irecv(peer.rank, tag, peer.buffer.data(), peer.buffer.size());
}

void Messenger::send(int child, FrameType type, const std::vector<char>& body, bool last) {
  constexpr size_t kMostBody = kFrameBytes - sizeof(Header);
  Peer& peer = peers_.at(child == kParent ? 0 : first_child_ + static_cast<size_t>(child));
  size_t at = 0;
  do {
    const size_t part = std::min(body.size() - at, kMostBody);
    const bool more = at + part < body.size();
    post(peer, {static_cast<uint32_t>(part), peer.sent++, type, more, last && !more},
         body.data() + at);
    at += part;
  } while (at < body.size());
}

void Messenger::post(Peer& peer, Header header, const char* body) {
  const size_t frame_bytes = sizeof header + header.size_bytes;
  std::vector<char>& frame = frame_;
  frame.resize(frame_bytes);
  std::memcpy(frame.data(), &header, sizeof header);
  if (header.size_bytes > 0) std::memcpy(frame.data() + sizeof header, body, header.size_bytes);
  if (peer.outbox && !header.last && peer.outbox->put(frame)) {
    mailed_bytes_.fetch_add(frame_bytes, std::memory_order_relaxed);
    return node_->count_given(frame_bytes);
  }
  sent_bytes_.fetch_add(frame_bytes, std::memory_order_relaxed);
  outgoing_.push_back({!peer.is_parent(), std::move(frame), nullptr});
  Outgoing& sent = outgoing_.back();
  const Tag tag = peer.is_parent() ? Tag::kSubmit : Tag::kResponse;
  sent.request = transport_.isend(peer.rank, tag, sent.bytes.data(), sent.bytes.size());
}

bool Messenger::progress() {
  bool any = false;
  outgoing_.remove_if([](Outgoing& sent) { return sent.request->test(); });
  for (Peer& peer : peers_) {
    while (peer.open && receive(peer)) {
      any = true;
      if (peer.is_parent()) break;
    }
  }
  return any;
}

// Handles the next frame from either channel; returns false if it has not arrived.
bool Messenger::receive(Peer& peer) {
  if (peer.inbox && !peer.has_mail) peer.has_mail = peer.inbox->take(peer.mail);
  if (peer.has_mail && header_of(peer.mail).number == peer.received) {
    peer.has_mail = false;
    handle(peer, peer.mail);
    return true;
  }
  const bool checks = !peer.inbox || peer.has_mail || ++peer.checks % kChecks == 0;
  if (!peer.arrived && checks) peer.arrived = peer.request->test();
  if (!peer.arrived || header_of(peer.buffer).number != peer.received) return false;
  // A copy, so that the next frame can arrive in the buffer meanwhile.
  const Header header = header_of(peer.buffer);
  const std::vector<char> frame(peer.buffer.begin(),
                                peer.buffer.begin() + sizeof header + header.size_bytes);
  if (!header.last) listen(peer);
  handle(peer, frame);
  return true;
}

void Messenger::handle(Peer& peer, const std::vector<char>& frame) {
  const Header header = header_of(frame);
  ++peer.received;
  peer.open = !header.last;
  const char* const body = frame.data() + sizeof header;
  if (!header.more) received_.fetch_add(1, std::memory_order_relaxed);
  if (!header.more && peer.message.empty()) {
    return on_message_(peer.child, header.type, Reader(body, header.size_bytes));
  }
  peer.message.insert(peer.message.end(), body, body + header.size_bytes);
  if (header.more) return;
  const std::vector<char> message = std::exchange(peer.message, {});
  on_message_(peer.child, header.type, Reader(message.data(), message.size()));
}

void Messenger::flush() {
  for (Outgoing& sent : outgoing_) transport_.wait(sent.request);
  outgoing_.clear();
}

void Messenger::flush_down() {
  for (Outgoing& sent : outgoing_) {
    if (sent.down) transport_.wait(sent.request);
  }
  outgoing_.remove_if([](const Outgoing& sent) { return sent.down; });
}

BytesGiven Messenger::bytes_sent() const {
  return {sent_bytes_.load(std::memory_order_relaxed),
          mailed_bytes_.load(std::memory_order_relaxed)};
}

}  // namespace qsgd
