// A transport among a subset of a job's ranks: a process set, a node, or one rank of every node.
#pragma once

#include <vector>

#include "transport/transport.h"

namespace qsgd {

// Rank i of the subset is `ranks[i]` of the parent, which must outlive it. Both use the same tags,
// so only one of them may execute a collective at a time.
class SubsetTransport final : public Transport {
 public:
  // Throws a usage error unless `ranks` are distinct ranks of the parent that include the caller.
  SubsetTransport(Transport& parent, std::vector<int> ranks);
  RequestPtr irecv(int peer, Tag tag, void* data, size_t capacity_bytes) override;
  void progress() override { parent_.progress(); }
  void count_sent(size_t size_bytes) override {
    Transport::count_sent(size_bytes);
    parent_.count_sent(size_bytes);
  }

 protected:
  // Counted here and in the parent.
  RequestPtr isend_impl(int peer, Tag tag, const void* data, size_t size_bytes,
                        Completion completion) override;

 private:
  Transport& parent_;
  const std::vector<int> ranks_;
};

}  // namespace qsgd
