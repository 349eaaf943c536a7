// Ranks as threads of one process, so that an allreduce on 64 ranks is an ordinary unit test.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "transport/shared_node.h"
#include "transport/transport.h"

namespace qsgd {

// The mailboxes shared by the ranks.
class ThreadWorld {
 public:
  explicit ThreadWorld(int size) : size_(size), abort_(std::make_shared<AbortFlag>()) {}
  int size() const { return size_; }
  std::shared_ptr<AbortFlag> abort_flag() const { return abort_; }

  // The data are copied, so a kSent request is complete at once.
  RequestPtr send(int from, int to, Tag tag, const void* data, size_t size_bytes,
                  Completion completion);
  RequestPtr receive(int from, int to, Tag tag, void* data, size_t capacity_bytes);
  // The maximum number of messages of a stream that waited for a receive.
  uint64_t most_waiting();
  // Zeroed memory of this rank, accessible to the others; exists as long as the world.
  void* region(int rank);

 private:
  class Matched;
  class Received;
  struct Stream {
    std::deque<std::vector<char>> messages;
    uint64_t posted = 0;  // total, like the next
    uint64_t receives = 0;
  };
  struct alignas(64) Region {
    char bytes[SharedNode::kRegionBytes] = {};
  };
  const int size_;
  const std::shared_ptr<AbortFlag> abort_;
  std::mutex mutex_;
  std::map<std::tuple<int, int, Tag>, Stream> streams_;  // by sender, receiver and tag
  uint64_t most_waiting_ = 0;
  std::map<int, std::unique_ptr<Region>> regions_;
};

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadWorld> world, int rank);
  RequestPtr irecv(int peer, Tag tag, void* data, size_t capacity_bytes) override {
    return world_->receive(peer, rank(), tag, data, capacity_bytes);
  }
  void progress() override {}  // the world stores what is sent

 protected:
  RequestPtr isend_impl(int peer, Tag tag, const void* data, size_t size_bytes,
                        Completion completion) override {
    return world_->send(rank(), peer, tag, data, size_bytes, completion);
  }

 private:
  const std::shared_ptr<ThreadWorld> world_;
};

// Consecutive groups of `ranks_per_node` ranks are nodes.
std::unique_ptr<SharedNode> make_thread_node(ThreadWorld& world, Transport& transport,
                                             int ranks_per_node);

}  // namespace qsgd
