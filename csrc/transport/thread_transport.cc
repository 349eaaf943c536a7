#include "transport/thread_transport.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "common/error.h"

namespace qsgd {
namespace {

class Sent final : public Request {
 public:
  bool test() override { return true; }
};

}  // namespace

class ThreadWorld::Matched final : public Request {
 public:
  Matched(ThreadWorld& world, const Stream& stream, uint64_t number)
      : world_(world), stream_(stream), number_(number) {}
  bool test() override {
    const std::lock_guard<std::mutex> lock(world_.mutex_);
    return stream_.receives > number_;
  }

 private:
  ThreadWorld& world_;
  const Stream& stream_;
  const uint64_t number_;  // of the message in its stream
};

class ThreadWorld::Received final : public Request {
 public:
  Received(ThreadWorld& world, Stream& stream, int from, void* data, size_t capacity_bytes)
      : world_(world), stream_(stream), from_(from), data_(data), capacity_bytes_(capacity_bytes) {}
  bool test() override {
    if (done_) return true;
    const std::lock_guard<std::mutex> lock(world_.mutex_);
    if (stream_.messages.empty()) return false;
    const std::vector<char>& message = stream_.messages.front();
    if (message.size() > capacity_bytes_) {
      throw internal_error("message of " + std::to_string(message.size()) + " bytes from rank " +
                           std::to_string(from_) + " for a buffer of " +
                           std::to_string(capacity_bytes_));
    }
    if (!message.empty()) std::memcpy(data_, message.data(), message.size());
    stream_.messages.pop_front();
    return done_ = true;
  }

 private:
  ThreadWorld& world_;
  Stream& stream_;
  const int from_;
  void* const data_;
  const size_t capacity_bytes_;
  bool done_ = false;
};

RequestPtr ThreadWorld::send(int from, int to, Tag tag, const void* data, size_t size_bytes,
                             Completion completion) {
  const char* bytes = static_cast<const char*>(data);
  std::vector<char> message(bytes, bytes + size_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  Stream& stream = streams_[{from, to, tag}];
  stream.messages.push_back(std::move(message));
  const uint64_t number = stream.posted++;
  if (stream.posted > stream.receives) {
    most_waiting_ = std::max(most_waiting_, stream.posted - stream.receives);
  }
  if (completion == Completion::kSent) return std::make_unique<Sent>();
  return std::make_unique<Matched>(*this, stream, number);
}

RequestPtr ThreadWorld::receive(int from, int to, Tag tag, void* data, size_t capacity_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Stream& stream = streams_[{from, to, tag}];
  ++stream.receives;
  return std::make_unique<Received>(*this, stream, from, data, capacity_bytes);
}

uint64_t ThreadWorld::most_waiting() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return most_waiting_;
}

void* ThreadWorld::region(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Region>& region = regions_[rank];
  if (region == nullptr) region = std::make_unique<Region>();
  return region->bytes;
}

ThreadTransport::ThreadTransport(std::shared_ptr<ThreadWorld> world, int rank)
    : Transport(rank, world->size(), world->abort_flag()), world_(std::move(world)) {}

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
