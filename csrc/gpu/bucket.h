// Layout of one bucket of gradients that is averaged and coded on a GPU: tables for the kernels.
// Owners and the layout of messages are as on the CPU.
#pragma once

#include <vector>

#include "collectives/bucket_coder.h"
#include "gpu/codec.h"

namespace qsgd::gpu {

class Bucket {
 public:
  // All tensors must have the same code. `residual` and `owner_residual` of each are device memory.
  Bucket(const std::vector<BucketTensor>& tensors, uint64_t seed, int rank, int size);

  // Bytes between the messages of consecutive ranks; an owner's message may be shorter.
  size_t stride() const { return stride_; }
  const CodecSpec& spec() const { return spec_; }

  // Elements sent to each other rank; the message for rank r begins at r * stride().
  const std::vector<Piece>& to_send() const { return to_send_; }
  // This rank's own elements, in one message.
  const std::vector<Piece>& to_sum() const { return to_sum_; }
  // All ranks' elements, laid out as in `to_send`.
  const std::vector<Piece>& to_take() const { return to_take_; }

 private:
  CodecSpec spec_;
  size_t stride_ = 0;
  std::vector<Piece> to_send_;
  std::vector<Piece> to_sum_;
  std::vector<Piece> to_take_;
};

// Number of buckets of all pieces.
uint64_t buckets(const std::vector<Piece>& pieces, const CodecSpec& spec);

}  // namespace qsgd::gpu
