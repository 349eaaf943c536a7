#include "transport/mailbox.h"

#include <algorithm>
#include <cstring>

namespace qsgd {
namespace {

using Line = MailLines::Line;
using Size = uint32_t;  // size of a message, before its first byte

static_assert(sizeof(Line) == 64 && std::atomic<uint64_t>::is_always_lock_free);

size_t lines_of(size_t size_bytes) {
  return (sizeof(Size) + size_bytes + sizeof(Line::bytes) - 1) / sizeof(Line::bytes);
}

}  // namespace

Outbox::Outbox(void* memory)
    : lines_(static_cast<MailLines*>(memory)),
      next_(lines_->written.value.load(std::memory_order_relaxed)),
      taken_(lines_->taken.value.load(std::memory_order_acquire)) {}

bool Outbox::put(const std::vector<char>& message) {
  const size_t count = lines_of(message.size());
  if (next_ + count - taken_ > MailLines::kLines) {
    taken_ = lines_->taken.value.load(std::memory_order_acquire);
    if (next_ + count - taken_ > MailLines::kLines) return false;
  }
  const auto size = static_cast<Size>(message.size());
  Line& first = lines_->line(next_);
  std::memcpy(first.bytes, &size, sizeof size);
  size_t at = std::min(message.size(), sizeof first.bytes - sizeof size);
  std::copy_n(message.begin(), at, first.bytes + sizeof size);
  for (size_t i = 1; i < count; ++i) {
    Line& line = lines_->line(next_ + i);
    line.mark.store(0, std::memory_order_relaxed);
    const size_t part = std::min(message.size() - at, sizeof line.bytes);
    std::copy_n(message.begin() + static_cast<std::ptrdiff_t>(at), part, line.bytes);
    at += part;
  }
  first.mark.store(next_ + 1, std::memory_order_release);
  next_ += count;
  lines_->written.value.store(next_, std::memory_order_relaxed);
  return true;
}

Inbox::Inbox(void* memory)
    : lines_(static_cast<MailLines*>(memory)),
      next_(lines_->taken.value.load(std::memory_order_relaxed)) {}

bool Inbox::take(std::vector<char>& message) {
  const Line& first = lines_->line(next_);
  if (first.mark.load(std::memory_order_acquire) != next_ + 1) return false;
  Size size = 0;
  std::memcpy(&size, first.bytes, sizeof size);
  message.resize(size);
  size_t at = std::min<size_t>(size, sizeof first.bytes - sizeof size);
  std::copy_n(first.bytes + sizeof size, at, message.begin());
  const size_t count = lines_of(size);
  for (size_t i = 1; i < count; ++i) {
    const size_t part = std::min<size_t>(size - at, sizeof first.bytes);
    std::copy_n(lines_->line(next_ + i).bytes, part,
                message.begin() + static_cast<std::ptrdiff_t>(at));
    at += part;
  }
  next_ += count;
  lines_->taken.value.store(next_, std::memory_order_release);
  return true;
}

}  // namespace qsgd
