// Transport of bytes between ranks. Collectives use only this interface.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace qsgd {

// Set once if the job cannot continue; every wait then ends with the message.
class AbortFlag {
 public:
  void raise(const std::string& message);
  bool raised() const { return raised_.load(std::memory_order_acquire); }
  std::string message() const;
  // Throws a rank-failed error if raised.
  void check() const;
  // Whether the program has been informed: one of its operations failed with the message.
  bool noticed() const { return noticed_.load(std::memory_order_relaxed); }
  void set_noticed() { noticed_.store(true, std::memory_order_relaxed); }

 private:
  std::atomic<bool> raised_{false};
  std::atomic<bool> noticed_{false};
  mutable std::mutex mutex_;
  std::string message_;
};

// A send or receive in flight. Destroying one that is not complete leaves its buffer in use.
class Request {
 public:
  virtual ~Request() = default;
  // Makes progress; returns whether the operation is complete.
  virtual bool test() = 0;
};
using RequestPtr = std::unique_ptr<Request>;

// Message streams that do not overtake each other. kGather is for the second phase of a collective,
// whose messages may arrive while those of the first are still expected.
enum class Tag : int { kSubmit = 1, kResponse = 2, kData = 3, kGather = 4 };

// When a send is complete: when its buffer may be reused (kSent), or when the peer has posted a
// receive (kMatched). Senders of many messages must use kMatched regularly: messages without a
// posted receive fill the peer's memory, and libfabric over TCP permanently stops reading after 64
// of them.
enum class Completion : uint8_t { kSent, kMatched };

// Bytes that a rank has provided to others: in messages, and in shared memory of its node.
struct BytesGiven {
  uint64_t in_messages = 0;
  uint64_t in_memory = 0;
  uint64_t total() const { return in_messages + in_memory; }
};

// Point-to-point messages among `size` ranks, in order per (peer, tag). Used by one thread at a
// time.
class Transport {
 public:
  Transport(int rank, int size, std::shared_ptr<AbortFlag> abort)
      : rank_(rank), size_(size), abort_(std::move(abort)) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  AbortFlag& abort_flag() { return *abort_; }
  const std::shared_ptr<AbortFlag>& shared_abort_flag() const { return abort_; }
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  // Adds bytes that the rank has sent by other means.
  virtual void count_sent(size_t size_bytes) {
    bytes_sent_.fetch_add(size_bytes, std::memory_order_relaxed);
  }

  // `data` must not change until the request is complete.
  RequestPtr isend(int peer, Tag tag, const void* data, size_t size_bytes,
                   Completion completion = Completion::kSent);
  // The message may be shorter than `capacity_bytes`; it must then contain its length.
  virtual RequestPtr irecv(int peer, Tag tag, void* data, size_t capacity_bytes) = 0;

  // Progresses all messages in flight; for a rank that waits for something other than a message.
  virtual void progress() = 0;

  // Blocks until all are complete; throws if the job is aborted.
  void wait(std::vector<RequestPtr>& requests);
  void wait(RequestPtr& request);

 protected:
  virtual RequestPtr isend_impl(int peer, Tag tag, const void* data, size_t size_bytes,
                                Completion completion) = 0;

 private:
  const int rank_;
  const int size_;
  const std::shared_ptr<AbortFlag> abort_;
  std::atomic<uint64_t> bytes_sent_{0};
};

// While an object exists, long waits of this thread regularly call `interrupted`, and end with an
// error when it returns true: for a thread that must also react to other events, such as signals.
class Interruptible {
 public:
  explicit Interruptible(std::function<bool()> interrupted);  // may be null
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // Called during a wait.
  static void check();

 private:
  const std::function<bool()> interrupted_;
  Interruptible* const outer_;
  std::chrono::steady_clock::time_point next_;
};

// Polling with increasing intervals: spins briefly, then yields the core, then sleeps.
class Backoff {
 public:
  void pause();
  // The same, but returns the time to sleep, for a caller that can be woken; 0: no sleep.
  std::chrono::nanoseconds pause_or_nap();
  // Whether the wait is longer than the spinning phase.
  bool is_long() const { return long_; }
  void reset() { *this = Backoff(); }

 private:
  bool spins_on();
  bool long_ = false;
  unsigned turns_ = 0;
  std::chrono::steady_clock::time_point since_;  // of the first turn
  unsigned naps_ = 0;
  std::chrono::steady_clock::time_point yields_until_;  // set by the first yield
};

}  // namespace qsgd
