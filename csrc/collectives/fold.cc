#include "collectives/fold.h"

#include <cstring>
#include <vector>

#include "common/kept.h"

namespace qsgd {

void reduce_ordered(void* own, void* other, size_t count, DType dtype, ReduceOp op,
                    bool other_is_lower) {
  if (!other_is_lower) return reduce_into(own, other, count, dtype, op);
  reduce_into(other, own, count, dtype, op);
  if (count > 0) std::memcpy(own, other, count * facts(dtype).size);
}

void Fold::in(void* data, size_t count, DType dtype, ReduceOp op) {
  const size_t size_bytes = count * facts(dtype).size;
  if (surplus()) {
    RequestPtr sent = transport_.isend(partner(), Tag::kData, data, size_bytes);
    transport_.wait(sent);
  } else if (partner() < transport_.size()) {
    KeptOnFailure<std::vector<char>> incoming;
    incoming->resize(size_bytes);
    RequestPtr received = transport_.irecv(partner(), Tag::kData, incoming->data(), size_bytes);
    transport_.wait(received);
    reduce_into(data, incoming->data(), count, dtype, op);
  }
}

void Fold::out(void* data, size_t size_bytes) {
  if (!surplus() && partner() >= transport_.size()) return;
  RequestPtr request = surplus() ? transport_.irecv(partner(), Tag::kGather, data, size_bytes)
                                 : transport_.isend(partner(), Tag::kGather, data, size_bytes);
  transport_.wait(request);
}

}  // namespace qsgd
