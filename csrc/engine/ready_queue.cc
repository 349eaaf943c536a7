#include "engine/ready_queue.h"

#include <algorithm>

namespace qsgd {
namespace {

constexpr size_t kMaxNamesBytes = 32 << 10;  // per response, so that it fits in a frame
constexpr size_t kOperationBytes = 256;      // about, besides the name, for a rank that has joined

size_t response_bytes(const Agreed& agreed) {
  const size_t name = agreed.operation->name.size() + sizeof(uint32_t);
  return agreed.joined ? 2 * name + kOperationBytes : name;
}

bool may_follow(const Agreed& first, const Agreed& next) {
  return !first.fault && !next.fault && first.group == next.group &&
         first.algorithm == next.algorithm && first.coding.has_value() == next.coding.has_value() &&
         first.joined == next.joined && fusable(*first.operation, *next.operation);
}

}  // namespace

void ReadyQueue::push(Agreed agreed) {
  if (!agreed.grouped) return ready_.push_back(std::move(agreed));
  const GroupKey group = group_of(*agreed.operation);
  groups_[group].push_back(std::move(agreed));
}

void ReadyQueue::release(const GroupKey& key) {
  const auto it = groups_.find(key);
  if (it == groups_.end()) return;
  std::vector<Agreed> group = std::move(it->second);
  groups_.erase(it);
  const auto failed = std::find_if(group.begin(), group.end(),
                                   [](const Agreed& member) { return bool{member.fault}; });
  const Fault fault = failed == group.end() ? Fault{} : failed->fault;
  ++last_group_;
  for (Agreed& member : group) {
    member.fault = fault;
    member.group = last_group_;
    ready_.push_back(std::move(member));
  }
}

void ReadyQueue::fail_group(const GroupKey& key, const Fault& fault) {
  const auto it = groups_.find(key);
  if (it == groups_.end()) return;
  it->second.front().fault = fault;
  release(key);
}

const Operation* ReadyQueue::holds(const Key& key) const {
  for (const auto& [group, members] : groups_) {
    for (const Agreed& member : members) {
      if (member.operation->key() == key) return member.operation.get();
    }
  }
  return nullptr;
}

std::vector<Response> ReadyQueue::take(size_t fusion_bytes) {
  std::vector<Response> responses;
  while (!ready_.empty()) responses.push_back(take_one(fusion_bytes));
  return responses;
}

Response ReadyQueue::take_one(size_t fusion_bytes) {
  const Agreed first = std::move(ready_.front());
  Response response;
  response.set = first.operation->set;
  response.recipients = first.ranks;
  response.fault = first.fault;
  response.lasting = first.operation->lasting;
  response.algorithm = first.algorithm;
  response.on_device = first.operation->on_device;
  response.rows = first.rows;
  response.value = first.value;
  size_t bytes = 0, response_size = 0;
  const auto add = [&](const Agreed& next) {
    bytes += next.operation->size_bytes();
    response.count += next.operation->count();
    response_size += response_bytes(next);
    response.names.push_back(next.operation->name);
    if (next.coding) response.codings.push_back(*next.coding);
    if (next.joined || changes_ranks(next.operation->kind)) {
      response.operations.push_back(next.operation);
    }
  };
  add(first);
  // Skip tensors that cannot be fused with the first: coded and exact gradients alternate in most
  // models.
  std::vector<Agreed> rest;
  bool full = false;
  for (size_t i = 1; i < ready_.size(); ++i) {
    Agreed& next = ready_[i];
    const bool joins = !full && may_follow(first, next);
    const bool fits = first.group != 0 || bytes + next.operation->size_bytes() <= fusion_bytes;
    full |= joins && (!fits || response_size + response_bytes(next) > kMaxNamesBytes);
    if (joins && !full) {
      add(next);
    } else {
      rest.push_back(std::move(next));
    }
  }
  ready_.swap(rest);
  response.grouped = first.group != 0;
  response.group_goes_on =
      response.grouped && !ready_.empty() && ready_.front().group == first.group;
  return response;
}

}  // namespace qsgd
