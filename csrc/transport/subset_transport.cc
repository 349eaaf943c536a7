#include "transport/subset_transport.h"

#include <algorithm>

#include "common/error.h"
#include "common/listed.h"

namespace qsgd {
namespace {

// The caller's position in `ranks`.
int place_in(const Transport& parent, const std::vector<int>& ranks) {
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  const bool distinct = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  const auto place = std::find(ranks.begin(), ranks.end(), parent.rank());
  if (place == ranks.end() || !distinct || sorted.front() < 0 || sorted.back() >= parent.size()) {
    throw usage_error("rank " + std::to_string(parent.rank()) + ": process set [" + listed(ranks) +
                      "] of a job of " + std::to_string(parent.size()) +
                      " ranks; list each rank once, from 0 to " +
                      std::to_string(parent.size() - 1) + ", the calling rank among them");
  }
  return static_cast<int>(place - ranks.begin());
}

}  // namespace

SubsetTransport::SubsetTransport(Transport& parent, std::vector<int> ranks)
    : Transport(place_in(parent, ranks), static_cast<int>(ranks.size()),
                parent.shared_abort_flag()),
      parent_(parent),
      ranks_(std::move(ranks)) {}

RequestPtr SubsetTransport::irecv(int peer, Tag tag, void* data, size_t capacity_bytes) {
  return parent_.irecv(ranks_.at(static_cast<size_t>(peer)), tag, data, capacity_bytes);
}

RequestPtr SubsetTransport::isend_impl(int peer, Tag tag, const void* data, size_t size_bytes,
                                       Completion completion) {
  return parent_.isend(ranks_.at(static_cast<size_t>(peer)), tag, data, size_bytes, completion);
}

}  // namespace qsgd
