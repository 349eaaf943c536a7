#include "engine/operations.h"

#include <algorithm>
#include <numeric>

#include "collectives/allgather.h"
#include "collectives/alltoall.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
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

}  // namespace

bool Operations::needs_host(const Response& response, const std::vector<Entry*>& entries) {
  return nccl_for(response, entries) == nullptr &&
         std::any_of(entries.begin(), entries.end(), is_on_device) &&
         !reducer_.codes_on(device_of(entries), response, entries);
}

bool Operations::may_stay(const Operation& operation) const {
  if (config_.nccl_library.empty() || all_.refused()) return false;
  return operation.kind == OpKind::kBroadcast ||
         (operation.kind == OpKind::kAllreduce && gpu::Nccl::reduces(operation.args));
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
  gpu::Device* const device = placed == entries.end() ? nullptr : &(*placed)->ready->device();
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
  if (gpu::Nccl* const nccl = nccl_for(response, entries)) return by_nccl(*nccl, response, entries);
  if (gpu::Device* const device = device_of(entries)) {
    const gpu::Device::Use here(*device);
    return reducer_.reduce(response, entries, device);
  }
  if (entries.front()->operation->kind == OpKind::kAllreduce) {
    return reducer_.reduce(response, entries);
  }
  std::vector<Outcome> outcomes;
  for (const Entry* entry : entries) {
    outcomes.emplace_back().result = do_one(*entry, response);
  }
  return outcomes;
}

std::vector<Outcome> Operations::by_nccl(gpu::Nccl& nccl, const Response& response,
                                         const std::vector<Entry*>& entries) {
  const gpu::Device::Use here(nccl.device());
  if (entries.front()->operation->kind == OpKind::kAllreduce) {
    return reducer_.reduce(response, entries, nullptr, &nccl);
  }
  for (const Entry* entry : entries) {
    const Operation& o = *entry->operation;
    const Place* const place = is_on_device(entry) ? &entry->ready->device() : nullptr;
    nccl.broadcast(entry->out, o.size_bytes(), place_of(o.root), place);
  }
  return std::vector<Outcome>(entries.size());
}

Result Operations::do_one(const Entry& entry, const Response& response) {
  const Operation& o = *entry.operation;
  switch (o.kind) {
    case OpKind::kBroadcast:
      broadcast(communicator_.transport, entry.out, o.size_bytes(), place_of(o.root));
      return {};
    case OpKind::kAllgather:
      return allgather(entry, response.rows);
    case OpKind::kAlltoall:
      return alltoall(entry);
    case OpKind::kReducescatter:
      return reducescatter(entry);
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

Result Operations::allgather(const Entry& entry, const std::vector<int64_t>& rows) {
  const Operation& o = *entry.operation;
  KeptOnFailure<Memory> out(Memory(static_cast<size_t>(sum(rows)) * o.row_bytes()));
  allgatherv(communicator_.transport, entry.in, out->data(), times(rows, o.row_bytes()));
  return {std::move(*out), with_rows(o.shape, sum(rows)), rows};
}

// Each rank sends the others the number of its rows: through rank 0, all splits would have to go to
// all ranks.
Result Operations::alltoall(const Entry& entry) {
  const Operation& o = *entry.operation;
  Transport& transport = communicator_.transport;
  const Numbers splits = splits_of(o, ranks_.size());
  const std::vector<size_t> one(splits.size(), sizeof(int64_t));
  KeptOnFailure<Numbers> sent{splits}, kept{splits};
  Numbers& received = *kept;
  alltoallv(transport, sent->data(), one, received.data(), one);
  KeptOnFailure<Memory> out(Memory(static_cast<size_t>(sum(received)) * o.row_bytes()));
  alltoallv(transport, entry.in, times(splits, o.row_bytes()), out->data(),
            times(received, o.row_bytes()));
  return {std::move(*out), with_rows(o.shape, sum(received)), std::move(received)};
}

Result Operations::reducescatter(const Entry& entry) {
  const Operation& o = *entry.operation;
  Transport& transport = communicator_.transport;
  const std::vector<int64_t> rows = even_rows(o.rows(), transport.size());
  const int64_t mine = rows[static_cast<size_t>(transport.rank())];
  Memory out(static_cast<size_t>(mine) * o.row_bytes());
  qsgd::reducescatter(transport, entry.in, out.data(), times(rows, o.row_count()), o.args);
  return {std::move(out), with_rows(o.shape, mine), {}};
}

}  // namespace qsgd
