// Short messages from one rank of a node to another, through memory they share, without MPI.
//
// A ring of cache lines. A message takes whole lines, and the mark of its first one, written last,
// says that it is there: one that fits a line is moved by a single transfer between two cores.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace qsgd {

// How a mailbox lies in memory: zeroed at first, and later as its two ends have left it.
struct MailLines {
  static constexpr size_t kLines = 126;
  struct alignas(64) Line {
    std::atomic<uint64_t> mark;  // of a first line: one more than its place in the stream of lines
    char bytes[56];
  };
  struct alignas(64) Place {
    std::atomic<uint64_t> value;  // in the stream of lines
  };
  Place written;  // by the sender, for an outbox to come
  Place taken;    // by the receiver; the sender must not pass it by more than kLines
  Line lines[kLines];

  Line& line(uint64_t place) { return lines[place % kLines]; }
};

// One thread at a time uses each end.
class Outbox {
 public:
  explicit Outbox(void* memory);
  // False where there is no room for it now, or never: it must go another way.
  bool put(const std::vector<char>& message);

 private:
  MailLines* lines_;
  uint64_t next_;   // line
  uint64_t taken_;  // as last seen
};

class Inbox {
 public:
  explicit Inbox(void* memory);
  // False while no message waits; else it is the oldest.
  bool take(std::vector<char>& message);

 private:
  MailLines* lines_;
  uint64_t next_;  // line
};

}  // namespace qsgd
