// Memory that the ranks of one node share: a region per rank, written by its owner and read by all,
// and flags that only ever grow. One thread per rank uses it at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/mailbox.h"
#include "transport/transport.h"

namespace qsgd {

// Where every rank lives and where this node's regions begin in this process.
struct NodeFacts {
  std::vector<std::vector<int>> nodes;  // the ranks of every node, ascending; equal on every rank
  std::vector<std::uintptr_t> bases;    // one per rank of this node, kRegionBytes zeroed bytes each
};

class SharedNode {
 public:
  // Counts what a rank has done since the start; each has a cache line of its own.
  enum class Flag : size_t { kPosted, kFilled, kReduced, kCopied, kFlags };

  // Slots are small enough that a few of them stay in a core's second-level cache.
  static constexpr size_t kSlots = 4;
  static constexpr size_t kSlotBytes = size_t{128} << 10;
  // Two sets of slots, so that the two ways to use them need not wait for each other.
  enum class Lane : size_t { kOneShot, kTwoPhase, kLanes };
  static constexpr size_t kHeaderBytes = 4096;
  // Between the region's owner and one other rank of the node, which leads it: to that one, and
  // from it.
  enum class Mail : size_t { kUp, kDown, kMails };
  static constexpr size_t kMailAt =
      kHeaderBytes + static_cast<size_t>(Lane::kLanes) * kSlots * kSlotBytes;
  static constexpr size_t kRegionBytes =
      kMailAt + static_cast<size_t>(Mail::kMails) * sizeof(MailLines);

  // `transport` is that of the whole job and outlives this; while a rank waits here, it moves on
  // what others are owed of it. Regions may have served before, to the same ranks.
  // Throws a usage error when the facts contradict each other.
  SharedNode(NodeFacts facts, Transport& transport);

  int rank() const { return rank_; }  // within the node
  int size() const { return static_cast<int>(facts_.bases.size()); }
  int node() const { return node_; }
  const std::vector<std::vector<int>>& nodes() const { return facts_.nodes; }

  // The slot of turn `turn` in the region of local rank `owner`.
  char* slot(int owner, Lane lane, uint64_t turn) const;

  // Whether `rank` of the job and this one are of one node.
  bool is_near(int rank) const;
  // The mailbox in the region of `rank`, which is near; this rank is one of its two ends.
  void* mailbox(int rank, Mail mail) const;

  // What this rank has reached.
  uint64_t reached(Flag flag) const { return reached_[static_cast<size_t>(flag)]; }
  // All that was written before is seen by whoever waits for `value`.
  void reach(Flag flag, uint64_t value);
  // Returns once local rank `owner`, or every one, has reached `value`; throws when the job is
  // aborted meanwhile.
  void wait(Flag flag, int owner, uint64_t value) const;
  void wait_all(Flag flag, uint64_t value) const;

  // Counts what the others read of this rank's slots.
  void count_given(size_t size_bytes) {
    bytes_given_.fetch_add(size_bytes, std::memory_order_relaxed);
  }
  uint64_t bytes_given() const { return bytes_given_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t>& flag_of(int owner, Flag flag) const;

  const NodeFacts facts_;
  Transport& transport_;
  int node_ = -1;
  int rank_ = -1;
  std::atomic<uint64_t> bytes_given_{0};
  uint64_t reached_[static_cast<size_t>(Flag::kFlags)] = {};
};

}  // namespace qsgd
