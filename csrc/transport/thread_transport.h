// Ranks as threads of one process: an allreduce on 64 ranks becomes an ordinary unit test.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "transport/shared_node.h"
#include "transport/transport.h"

namespace qsgd {

// The mailboxes that the ranks share.
class ThreadWorld {
 public:
  explicit ThreadWorld(int size) : size_(size), abort_(std::make_shared<AbortFlag>()) {}
  int size() const { return size_; }
  std::shared_ptr<AbortFlag> abort_flag() const { return abort_; }

  // Returns the message's number in its stream.
  uint64_t post(int from, int to, Tag tag, const void* data, size_t size_bytes);
  // The receiver has room for one message more.
  void ask(int from, int to, Tag tag);
  bool asked_for(int from, int to, Tag tag, uint64_t number);
  // False while no message waits.
  bool take(int from, int to, Tag tag, void* data, size_t capacity_bytes);
  // The most messages of one stream that nobody had asked for at once.
  uint64_t most_waiting();
  // Memory of this rank that the others reach too, zeroed; lives as long as the world.
  void* region(int rank);

 private:
  using Box = std::tuple<int, int, Tag>;
  struct Stream {
    std::deque<std::vector<char>> messages;
    uint64_t posted = 0;  // ever, as is the next
    uint64_t asked = 0;
  };
  struct alignas(64) Region {
    char bytes[SharedNode::kRegionBytes] = {};
  };
  const int size_;
  const std::shared_ptr<AbortFlag> abort_;
  std::mutex mutex_;
  std::map<Box, Stream> boxes_;
  uint64_t most_waiting_ = 0;
  std::map<int, std::unique_ptr<Region>> regions_;
};

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadWorld> world, int rank);
  RequestPtr irecv(int peer, Tag tag, void* data, size_t capacity_bytes) override;
  void progress() override {}  // the world keeps what is sent

 protected:
  RequestPtr isend_impl(int peer, Tag tag, const void* data, size_t size_bytes,
                        Completion completion) override;

 private:
  const std::shared_ptr<ThreadWorld> world_;
};

// Each run of `ranks_per_node` ranks is a node.
std::unique_ptr<SharedNode> make_thread_node(ThreadWorld& world, Transport& transport,
                                             int ranks_per_node);

}  // namespace qsgd
