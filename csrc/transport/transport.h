// How bytes get from rank to rank. Collectives know this interface and nothing below it.
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

// Set once when the job cannot go on; every wait then ends with the message.
class AbortFlag {
 public:
  void raise(const std::string& message);
  bool raised() const { return raised_.load(std::memory_order_acquire); }
  std::string message() const;
  // Throws a rank-failed error if raised.
  void check() const;
  // Whether the program has been told: an operation of its own ended with the message.
  bool noticed() const { return noticed_.load(std::memory_order_relaxed); }
  void set_noticed() { noticed_.store(true, std::memory_order_relaxed); }

 private:
  std::atomic<bool> raised_{false};
  std::atomic<bool> noticed_{false};
  mutable std::mutex mutex_;
  std::string message_;
};

// A send or receive under way. Destroying one that is not done leaves its buffer in use: wait.
class Request {
 public:
  virtual ~Request() = default;
  // Makes progress; true once the operation is complete.
  virtual bool test() = 0;
};
using RequestPtr = std::unique_ptr<Request>;

// Streams that do not overtake each other; kGather is for the second phase of a collective, whose
// messages may arrive while those of the first are still expected.
enum class Tag : int { kSubmit = 1, kResponse = 2, kData = 3, kGather = 4 };

// When a send is complete: once its buffer may be used again, or only when the peer has asked for
// the message. Who sends many waits for an answer now and then: messages that nobody has asked for
// yet fill the peer's memory, and libfabric over TCP stops reading after 64 of them, for good.
enum class Completion : uint8_t { kSent, kAsked };

// What a rank has handed to others: in messages, and in memory that its node shares.
struct BytesGiven {
  uint64_t in_messages = 0;
  uint64_t in_memory = 0;
  uint64_t total() const { return in_messages + in_memory; }
};

// Point-to-point messages among `size` ranks, in order per (peer, tag). Not for two threads at
// once.
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
  // Adds what the rank has handed to others in another way.
  virtual void count_sent(size_t size_bytes) {
    bytes_sent_.fetch_add(size_bytes, std::memory_order_relaxed);
  }

  // `data` stays untouched until the request is complete.
  RequestPtr isend(int peer, Tag tag, const void* data, size_t size_bytes,
                   Completion completion = Completion::kSent);
  // The message may be shorter than `capacity_bytes`; then it must tell its length itself.
  virtual RequestPtr irecv(int peer, Tag tag, void* data, size_t capacity_bytes) = 0;

  // Moves on whatever is under way; for a rank that waits for something else than a message.
  virtual void progress() = 0;

  // Returns when all are complete; throws when the job is aborted meanwhile.
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

// While one lives, this thread's long waits ask it now and then, and end with an error once it says
// yes: for a thread that must answer to someone else too.
class Interruptible {
 public:
  explicit Interruptible(std::function<bool()> interrupted);  // may be null
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // In the midst of a wait.
  static void check();

 private:
  const std::function<bool()> interrupted_;
  Interruptible* const outer_;
  std::chrono::steady_clock::time_point next_;
};

// Polls politely: spins briefly, then yields the core, then sleeps ever longer.
class Backoff {
 public:
  void pause();
  // The same, but says how long to sleep where it would, and leaves that to a caller that can be
  // woken; else 0.
  std::chrono::nanoseconds pause_or_nap();
  // Whether the brief part is over.
  bool is_long() const { return long_; }
  void reset() { *this = Backoff(); }

 private:
  bool spins_on();
  bool long_ = false;
  unsigned turns_ = 0;
  std::chrono::steady_clock::time_point since_;  // the first turn
  unsigned naps_ = 0;
  std::chrono::steady_clock::time_point yields_until_;  // set by the first yield
};

}  // namespace qsgd
