// Short messages between two ranks of a node through shared memory, without MPI.
//
// A mailbox is a ring of cache lines. A message uses complete lines, and the mark of its first
// line, written last, makes it visible: a message of one line needs a single transfer between two
// cores.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace qsgd {

// Layout of a mailbox in memory: initially zero, later as left by its two ends.
struct MailLines {
  static constexpr size_t kLines = 126;
  struct alignas(64) Line {
    std::atomic<uint64_t> mark;  // of a first line: its number in the stream, plus 1
    char bytes[56];
  };
  struct alignas(64) Place {
    std::atomic<uint64_t> value;  // number in the stream of lines
  };
  Place written;  // by the sender; read by later outboxes
  Place taken;    // by the receiver; the sender must not be more than kLines ahead
  Line lines[kLines];

  Line& line(uint64_t place) { return lines[place % kLines]; }
};

// Each end is used by one thread at a time.
class Outbox {
 public:
  explicit Outbox(void* memory);
  // Returns false if there is no space now, or if the message is too long: it must be sent
  // otherwise.
  bool put(const std::vector<char>& message);

 private:
  MailLines* lines_;
  uint64_t next_;   // line
  uint64_t taken_;  // as last read
};

class Inbox {
 public:
  explicit Inbox(void* memory);
  // Returns false if no message waits; otherwise returns the oldest.
  bool take(std::vector<char>& message);

 private:
  MailLines* lines_;
  uint64_t next_;  // line
};

}  // namespace qsgd
