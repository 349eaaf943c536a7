#include "gpu/bucket.h"

#include <algorithm>
#include <limits>

#include "collectives/segments.h"
#include "common/error.h"
#include "quant/philox.h"

namespace qsgd::gpu {
namespace {

uint64_t address(const float* at) { return reinterpret_cast<uint64_t>(at); }

// Appends the pieces of a message that begins at `message_at`.
void append(const Segment& segment, const std::vector<BucketTensor>& tensors, uint64_t seed,
            uint64_t message_at, bool as_owner, const CodecSpec& spec, std::vector<Piece>* to) {
  for (const qsgd::Piece& piece : segment.pieces) {
    const BucketTensor& tensor = tensors[piece.tensor];
    Piece out{};
    out.at = tensor.at + piece.begin;
    out.count = piece.count;
    out.first = piece.begin;
    out.tensor = Philox::mix(seed, tensor.id);
    out.scales_at = message_at + piece.scales_at;
    out.codes_at = message_at + piece.codes_at;
    out.first_bucket = buckets(*to, spec);
    if (tensor.residual != nullptr) out.residual = address(tensor.residual + piece.begin);
    if (as_owner && tensor.owner_residual != nullptr) {
      out.owner_residual = address(tensor.owner_residual + piece.place);
    }
    to->push_back(out);
  }
}

}  // namespace

uint64_t buckets(const std::vector<Piece>& pieces, const CodecSpec& spec) {
  return pieces.empty() ? 0 : pieces.back().first_bucket + spec.buckets(pieces.back().count);
}

Bucket::Bucket(const std::vector<BucketTensor>& tensors, uint64_t seed, int rank, int size) {
  std::vector<ReduceTensor> listed;
  for (const BucketTensor& tensor : tensors) {
    if (!tensor.spec) throw usage_error("the GPU's coder was given a tensor without a code");
    if (!listed.empty() && *tensor.spec != spec_) {
      throw usage_error("the tensors of one GPU coder must have one code");
    }
    spec_ = *tensor.spec;
    check(spec_);
    ReduceTensor item{};
    item.count = tensor.count;
    item.id = tensor.id;
    item.spec = spec_;
    listed.push_back(item);
  }
  const auto all = std::numeric_limits<size_t>::max();
  const std::vector<Chunk> chunks = chunks_of(listed, size, all);
  for (const Chunk& chunk : chunks)
    stride_ = std::max(stride_, largest_message(messages_of(chunk)));
  for (int owner = 0; owner < size; ++owner) {
    const uint64_t at = stride_ * static_cast<uint64_t>(owner);
    for (const Segment& segment : chunks[static_cast<size_t>(owner)]) {
      append(segment, tensors, seed, at, false, spec_, &to_take_);
      if (owner != rank) append(segment, tensors, seed, at, false, spec_, &to_send_);
      if (owner == rank) append(segment, tensors, seed, 0, true, spec_, &to_sum_);
    }
  }
}

}  // namespace qsgd::gpu
