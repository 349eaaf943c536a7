#include "engine/operations.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "collectives/exchange.h"
#include "collectives/reducescatter.h"
#include "common/kept.h"
#include "engine/staging.h"
#include "transport/subset_transport.h"

namespace qsgd {
namespace {

std::vector<size_t> times(const std::vector<int64_t>& rows, size_t each) {
  std::vector<size_t> sizes;
  for (const int64_t n : rows) sizes.push_back(static_cast<size_t>(n) * each);
  return sizes;
}

std::vector<int64_t> with_rows(std::vector<int64_t> shape, int64_t rows) {
  shape.front() = rows;
  return shape;
}

int64_t sum(const std::vector<int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

// As evenly as possible, the first ranks one row more.
std::vector<int64_t> even_rows(int64_t rows, int size) {
  std::vector<int64_t> parts(static_cast<size_t>(size), rows / size);
  for (int64_t i = 0; i < rows % size; ++i) ++parts[static_cast<size_t>(i)];
  return parts;
}

// A result of so many rows, with memory for them.
Result new_result(const Entry& entry, int64_t rows, const gpu::Nccl* nccl) {
  const size_t size_bytes = static_cast<size_t>(rows) * entry.operation->row_bytes();
  Result result;
  result.shape = with_rows(entry.operation->shape, rows);
  gpu::Device* const device = entry.copied_from != nullptr ? entry.copied_from : entry.device();
  if (device != nullptr) result.device = device->shared_from_this();
  if (nccl != nullptr && device == &nccl->device()) {
    result.on_device = gpu::DeviceMemory(*device, size_bytes);
  } else if (device != nullptr) {
    result.output = Memory(device->take_pinned(size_bytes), size_bytes);
  } else {
    result.output = Memory(size_bytes);
  }
  return result;
}

}  // namespace

bool Operations::needs_host(const Response& response, const std::vector<Entry*>& entries) {
  return nccl_for(response, entries) == nullptr &&
         std::any_of(entries.begin(), entries.end(), is_on_device) &&
         !reducer_.codes_on(device_of(entries), response, entries);
}

bool Operations::may_stay(const Operation& operation) const {
  if (config_.nccl_library.empty() || all_.refused()) return false;
  const bool reduces =
      operation.kind == OpKind::kAllreduce || operation.kind == OpKind::kReducescatter;
  return !reduces || gpu::Nccl::reduces(operation.args);
}

// All ranks that exchange messages get the same result, because its inputs are equal.
gpu::Nccl* Operations::nccl_for(const Response& response, const std::vector<Entry*>& entries) {
  if (!response.on_device) return nullptr;
  if (response.codings.empty()) {
    if (!may_stay(*entries.front()->operation)) return nullptr;
    return made(all_, ranks_, entries, [this](size_t n) { communicator_.transport.count_sent(n); });
  }
  if (!reducer_.sums_in_nodes(response) || !may_sum_in_nodes()) return nullptr;
  const std::vector<int>& ranks = communicator_.node->ranks();
  if (in_node_.transport == nullptr) {
    in_node_.transport = std::make_unique<SubsetTransport>(communicator_.transport, ranks);
  }
  gpu::Nccl* const nccl =
      made(in_node_, ranks, entries, [this](size_t n) { communicator_.node->count_given(n); });
  const bool codes = nccl != nullptr &&
                     std::all_of(response.codings.begin(), response.codings.end(),
                                 [&](const CodecSpec& spec) { return nccl->device().codes(spec); });
  return codes ? nccl : nullptr;
}

gpu::Nccl* Operations::made(Group& group, const std::vector<int>& ranks,
                            const std::vector<Entry*>& entries, gpu::Nccl::Count count) {
  if (group.tried) return group.nccl.get();
  group.tried = true;
  const auto placed = std::find_if(entries.begin(), entries.end(), is_on_device);
  gpu::Device* const device = placed == entries.end() ? nullptr : (*placed)->device();
  Transport& transport = group.transport ? *group.transport : communicator_.transport;
  group.nccl = gpu::Nccl::make(transport, ranks, config_.nccl_library, device, std::move(count),
                               config_.log);
  return group.nccl.get();
}

void Operations::close() {
  const bool aborted = communicator_.transport.abort_flag().raised();
  for (Group* const group : {&in_node_, &all_}) {
    if (group->nccl != nullptr && !aborted) group->nccl->close();
    group->nccl.reset();
  }
}

std::vector<Outcome> Operations::carry_out(const Response& response,
                                           const std::vector<Entry*>& entries) {
  gpu::Nccl* const nccl = nccl_for(response, entries);
  gpu::Device* const device = nccl != nullptr ? &nccl->device() : device_of(entries);
  const auto here =
      device != nullptr ? std::make_optional<gpu::Device::Use>(*device) : std::nullopt;
  if (entries.front()->operation->kind == OpKind::kAllreduce) {
    return reducer_.reduce(response, entries, nccl != nullptr ? nullptr : device, nccl);
  }
  std::vector<Outcome> outcomes;
  for (const Entry* entry : entries) {
    outcomes.emplace_back().result = do_one(*entry, response, nccl);
  }
  return outcomes;
}

Result Operations::do_one(const Entry& entry, const Response& response, gpu::Nccl* nccl) {
  const Operation& o = *entry.operation;
  switch (o.kind) {
    case OpKind::kBroadcast:
      broadcast(entry, nccl);
      return {};
    case OpKind::kAllgather:
      return allgather(entry, response.rows, nccl);
    case OpKind::kAlltoall:
      return alltoall(entry, nccl);
    case OpKind::kReducescatter:
      return reducescatter(entry, nccl);
    case OpKind::kBarrier:
      barrier(communicator_.transport);
      return {};
    default:
      break;
  }
  throw internal_error("operation '" + o.name + "' of unknown kind");
}

int Operations::place_of(int rank) const {
  return static_cast<int>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
}

void Operations::broadcast(const Entry& entry, gpu::Nccl* nccl) {
  const Operation& o = *entry.operation;
  if (nccl != nullptr) {
    nccl->broadcast(entry.out, o.size_bytes(), place_of(o.root), entry.device());
  } else {
    qsgd::broadcast(communicator_.transport, entry.out, o.size_bytes(), place_of(o.root));
  }
}

Result Operations::allgather(const Entry& entry, const std::vector<int64_t>& rows,
                             gpu::Nccl* nccl) {
  const KeptOnFailure<Result> result{new_result(entry, sum(rows), nccl)};
  result->sizes = rows;
  const std::vector<size_t> sizes = times(rows, entry.operation->row_bytes());
  if (nccl != nullptr) {
    nccl->allgather(entry.in, result->data(), sizes, entry.device());
  } else {
    allgatherv(communicator_.transport, entry.in, result->data(), sizes);
  }
  return std::move(*result);
}

// Each rank sends the others the number of its rows: through rank 0, all splits would have to go to
// all ranks.
Result Operations::alltoall(const Entry& entry, gpu::Nccl* nccl) {
  const Operation& o = *entry.operation;
  Transport& transport = communicator_.transport;
  const Numbers splits = splits_of(o, ranks_.size());
  const std::vector<size_t> one(splits.size(), sizeof(int64_t));
  const KeptOnFailure<Numbers> sent{splits}, received{splits};
  alltoallv(transport, sent->data(), one, received->data(), one);
  const KeptOnFailure<Result> result{new_result(entry, sum(*received), nccl)};
  const std::vector<size_t> given = times(splits, o.row_bytes());
  const std::vector<size_t> taken = times(*received, o.row_bytes());
  if (nccl != nullptr) {
    nccl->alltoall(entry.in, given, result->data(), taken, entry.device());
  } else {
    alltoallv(transport, entry.in, given, result->data(), taken);
  }
  result->sizes = std::move(*received);
  return std::move(*result);
}

Result Operations::reducescatter(const Entry& entry, gpu::Nccl* nccl) {
  const Operation& o = *entry.operation;
  Transport& transport = communicator_.transport;
  const std::vector<int64_t> rows = even_rows(o.rows(), transport.size());
  const int64_t mine = rows[static_cast<size_t>(transport.rank())];
  Result result = new_result(entry, mine, nccl);
  const std::vector<size_t> counts = times(rows, o.row_count());
  if (nccl != nullptr) {
    nccl->reducescatter(entry.in, result.data(), counts, o.args, entry.device());
  } else {
    qsgd::reducescatter(transport, entry.in, result.data(), counts, o.args);
  }
  return result;
}

}  // namespace qsgd
