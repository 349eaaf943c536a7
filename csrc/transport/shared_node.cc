#include "transport/shared_node.h"

#include <algorithm>
#include <string>

#include "common/error.h"

namespace qsgd {
namespace {

constexpr size_t kLineBytes = 64;
// Adjacent cache lines are prefetched in pairs, so flags are two lines apart.
constexpr size_t kFlagStride = 2 * kLineBytes;
static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t));
static_assert(std::atomic<uint64_t>::is_always_lock_free, "flags are shared by processes");
static_assert(static_cast<size_t>(SharedNode::Flag::kFlags) * kFlagStride <=
              SharedNode::kHeaderBytes);

}  // namespace

SharedNode::SharedNode(NodeFacts facts, Transport& transport)
    : facts_(std::move(facts)), transport_(transport) {
  const int rank = transport.rank();
  for (size_t n = 0; n < facts_.nodes.size(); ++n) {
    const std::vector<int>& ranks = facts_.nodes[n];
    const auto place = std::find(ranks.begin(), ranks.end(), rank);
    if (place == ranks.end()) continue;
    node_ = static_cast<int>(n);
    rank_ = static_cast<int>(place - ranks.begin());
  }
  if (node_ < 0 || ranks().size() != facts_.bases.size()) {
    throw usage_error("rank " + std::to_string(rank) + " shares memory with " +
                      std::to_string(facts_.bases.size()) +
                      " ranks, but the list of nodes says otherwise; build both from the same "
                      "communicator");
  }
  for (const std::uintptr_t base : facts_.bases) {
    if (base == 0 || base % kLineBytes != 0) {
      throw usage_error("rank " + std::to_string(rank) + ": shared memory at address " +
                        std::to_string(base) + "; it must begin at a multiple of " +
                        std::to_string(kLineBytes));
    }
  }
  for (size_t f = 0; f < static_cast<size_t>(Flag::kFlags); ++f) {
    reached_[f] = flag_of(rank_, static_cast<Flag>(f)).load(std::memory_order_relaxed);
  }
}

char* SharedNode::slot(int owner, Lane lane, uint64_t turn) const {
  const size_t index = static_cast<size_t>(lane) * kSlots + static_cast<size_t>(turn % kSlots);
  return region(owner) + kHeaderBytes + index * kSlotBytes;
}

bool SharedNode::is_near(int rank) const {
  return std::binary_search(ranks().begin(), ranks().end(), rank);
}

void* SharedNode::mailbox(int rank, Mail mail) const {
  const auto owner = std::lower_bound(ranks().begin(), ranks().end(), rank) - ranks().begin();
  return region(static_cast<int>(owner)) + kMailAt + static_cast<size_t>(mail) * sizeof(MailLines);
}

std::atomic<uint64_t>& SharedNode::flag_of(int owner, Flag flag) const {
  return *reinterpret_cast<std::atomic<uint64_t>*>(region(owner) +
                                                   static_cast<size_t>(flag) * kFlagStride);
}

void SharedNode::reach(Flag flag, uint64_t value) {
  reached_[static_cast<size_t>(flag)] = value;
  flag_of(rank_, flag).store(value, std::memory_order_release);
}

void SharedNode::wait(Flag flag, int owner, uint64_t value) const {
  const std::atomic<uint64_t>& reached = flag_of(owner, flag);
  Backoff backoff;
  while (reached.load(std::memory_order_acquire) < value) {
    transport_.abort_flag().check();
    // The awaited rank may itself wait until this rank has received the rest of a message.
    if (backoff.is_long()) transport_.progress();
    backoff.pause();
  }
}

void SharedNode::wait_all(Flag flag, uint64_t value) const {
  for (int owner = 0; owner < size(); ++owner) {
    if (owner != rank_) wait(flag, owner, value);
  }
}

}  // namespace qsgd
