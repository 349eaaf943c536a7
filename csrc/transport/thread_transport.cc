#include "transport/thread_transport.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "common/error.h"

namespace qsgd {
namespace {

class Done final : public Request {
 public:
  bool test() override { return true; }
};

class Matched final : public Request {
 public:
  Matched(ThreadWorld& world, int from, int to, Tag tag, uint64_t number)
      : world_(world), from_(from), to_(to), tag_(tag), number_(number) {}
  bool test() override { return world_.is_matched(from_, to_, tag_, number_); }

 private:
  ThreadWorld& world_;
  const int from_, to_;
  const Tag tag_;
  const uint64_t number_;
};

class Receive final : public Request {
 public:
  Receive(ThreadWorld& world, int from, int to, Tag tag, void* data, size_t capacity)
      : world_(world), from_(from), to_(to), tag_(tag), data_(data), capacity_(capacity) {}
  bool test() override {
    return done_ || (done_ = world_.take(from_, to_, tag_, data_, capacity_));
  }

 private:
  ThreadWorld& world_;
  const int from_, to_;
  const Tag tag_;
  void* const data_;
  const size_t capacity_;
  bool done_ = false;
};

}  // namespace

uint64_t ThreadWorld::post(int from, int to, Tag tag, const void* data, size_t size_bytes) {
  const char* bytes = static_cast<const char*>(data);
  std::vector<char> message(bytes, bytes + size_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  Stream& stream = boxes_[{from, to, tag}];
  stream.messages.push_back(std::move(message));
  const uint64_t number = stream.posted++;
  if (stream.posted > stream.receives) {
    most_waiting_ = std::max(most_waiting_, stream.posted - stream.receives);
  }
  return number;
}

void ThreadWorld::post_receive(int from, int to, Tag tag) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++boxes_[{from, to, tag}].receives;
}

bool ThreadWorld::is_matched(int from, int to, Tag tag, uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return boxes_[{from, to, tag}].receives > number;
}

uint64_t ThreadWorld::most_waiting() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return most_waiting_;
}

bool ThreadWorld::take(int from, int to, Tag tag, void* data, size_t capacity_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto box = boxes_.find({from, to, tag});
  if (box == boxes_.end() || box->second.messages.empty()) return false;
  std::deque<std::vector<char>>& messages = box->second.messages;
  const std::vector<char>& message = messages.front();
  if (message.size() > capacity_bytes) {
    throw internal_error("message of " + std::to_string(message.size()) + " bytes from rank " +
                         std::to_string(from) + " for a buffer of " +
                         std::to_string(capacity_bytes));
  }
  if (!message.empty()) std::memcpy(data, message.data(), message.size());
  messages.pop_front();
  return true;
}

void* ThreadWorld::region(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Region>& region = regions_[rank];
  if (region == nullptr) region = std::make_unique<Region>();
  return region->bytes;
}

ThreadTransport::ThreadTransport(std::shared_ptr<ThreadWorld> world, int rank)
    : Transport(rank, world->size(), world->abort_flag()), world_(std::move(world)) {}

RequestPtr ThreadTransport::irecv(int peer, Tag tag, void* data, size_t capacity_bytes) {
  world_->post_receive(peer, rank(), tag);
  return std::make_unique<Receive>(*world_, peer, rank(), tag, data, capacity_bytes);
}

RequestPtr ThreadTransport::isend_impl(int peer, Tag tag, const void* data, size_t size_bytes,
                                       Completion completion) {
  const uint64_t number = world_->post(rank(), peer, tag, data, size_bytes);
  if (completion == Completion::kSent) return std::make_unique<Done>();
  return std::make_unique<Matched>(*world_, rank(), peer, tag, number);
}

std::unique_ptr<SharedNode> make_thread_node(ThreadWorld& world, Transport& transport,
                                             int ranks_per_node) {
  if (ranks_per_node < 1) {
    throw usage_error("ranks_per_node=" + std::to_string(ranks_per_node) + "; use 1 or more");
  }
  const int rank = transport.rank();
  NodeFacts facts;
  for (int first = 0; first < world.size(); first += ranks_per_node) {
    std::vector<int>& node = facts.nodes.emplace_back();
    for (int r = first; r < std::min(first + ranks_per_node, world.size()); ++r) {
      node.push_back(r);
      if (rank / ranks_per_node == first / ranks_per_node) {
        facts.bases.push_back(reinterpret_cast<std::uintptr_t>(world.region(r)));
      }
    }
  }
  return std::make_unique<SharedNode>(std::move(facts), transport);
}

}  // namespace qsgd
