// Shared memory of the ranks of one node: a region per rank, written by its owner and read by all,
// and flags that only increase. Used by one thread per rank at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/mailbox.h"
#include "transport/transport.h"

namespace qsgd {

// The ranks of every node, and the addresses of this node's regions in this process.
struct NodeFacts {
  std::vector<std::vector<int>> nodes;  // the ranks of every node, ascending; equal on every rank
  std::vector<std::uintptr_t> bases;    // one per rank of this node, kRegionBytes zeroed bytes each
};

class SharedNode {
 public:
  // Number of turns that a rank has completed, by step; each flag has a separate cache line.
  enum class Flag : size_t { kPosted, kFilled, kReduced, kCopied, kFlags };

  // Slots are small enough that a few of them stay in a core's L2 cache.
  static constexpr size_t kSlots = 4;
  static constexpr size_t kSlotBytes = size_t{128} << 10;
  // Two sets of slots, so that their two uses need not wait for each other.
  enum class Lane : size_t { kOneShot, kTwoPhase, kLanes };
  static constexpr size_t kHeaderBytes = 4096;
  // Mailboxes between the region's owner and its parent in the tree, a rank of the same node: to
  // the parent, and from it.
  enum class Mail : size_t { kUp, kDown, kMails };
  static constexpr size_t kMailAt =
      kHeaderBytes + static_cast<size_t>(Lane::kLanes) * kSlots * kSlotBytes;
  static constexpr size_t kRegionBytes =
      kMailAt + static_cast<size_t>(Mail::kMails) * sizeof(MailLines);

  // `transport` is the whole job's and must outlive this; while a rank waits here, its messages
  // progress. Regions may have been used before by the same ranks.
  // Throws a usage error if the facts contradict each other.
  SharedNode(NodeFacts facts, Transport& transport);

  int rank() const { return rank_; }  // within the node
  int size() const { return static_cast<int>(facts_.bases.size()); }
  int node() const { return node_; }
  const std::vector<std::vector<int>>& nodes() const { return facts_.nodes; }
  // The ranks of this node in the job, ascending.
  const std::vector<int>& ranks() const { return facts_.nodes[static_cast<size_t>(node_)]; }

  // The slot of turn `turn` in the region of local rank `owner`.
  char* slot(int owner, Lane lane, uint64_t turn) const;

  // Whether `rank` is on this rank's node.
  bool is_near(int rank) const;
  // The mailbox in the region of `rank`, on this node; this rank is one of its two ends.
  void* mailbox(int rank, Mail mail) const;

  // This rank's own flag.
  uint64_t reached(Flag flag) const { return reached_[static_cast<size_t>(flag)]; }
  // Sets this rank's flag; everything written before is visible to ranks that wait for `value`.
  void reach(Flag flag, uint64_t value);
  // Blocks until local rank `owner`, or every rank, has reached `value`; throws if the job is
  // aborted.
  void wait(Flag flag, int owner, uint64_t value) const;
  void wait_all(Flag flag, uint64_t value) const;

  // Counts the bytes that other ranks read from this rank's slots.
  void count_given(size_t size_bytes) {
    bytes_given_.fetch_add(size_bytes, std::memory_order_relaxed);
  }
  uint64_t bytes_given() const { return bytes_given_.load(std::memory_order_relaxed); }

 private:
  char* region(int owner) const {
    return reinterpret_cast<char*>(facts_.bases[static_cast<size_t>(owner)]);
  }
  std::atomic<uint64_t>& flag_of(int owner, Flag flag) const;

  const NodeFacts facts_;
  Transport& transport_;
  int node_ = -1;
  int rank_ = -1;
  std::atomic<uint64_t> bytes_given_{0};
  uint64_t reached_[static_cast<size_t>(Flag::kFlags)] = {};
};

}  // namespace qsgd
