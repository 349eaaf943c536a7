// The tensors of a bucket that are not coded: summed as by an exact allreduce, or in float32 and
// rank order if their type has less precision.
#pragma once

#include "collectives/bucket_part.h"

namespace qsgd {

// Partition of tensors without a code: between tiles, so that messages stay aligned.
CodecSpec plain_cut();

class PlainPart : public BucketPart {
 public:
  // `tensors`, whose spec is plain_cut(), need no memory; begin() sets the bucket. `limit`: maximum
  // number of elements of a message.
  PlainPart(const std::vector<ReduceTensor>& tensors, std::vector<BucketPlace> places, DType dtype,
            int rank, int size, size_t limit);

  void begin(char* bucket, const std::vector<uint32_t>&) override { bucket_ = bucket; }
  size_t waves(int owner) const override { return chunks_[static_cast<size_t>(owner)].size(); }
  size_t bytes(size_t wave, int owner) const override;
  void encode(size_t wave, int owner, uint8_t* message) override;
  void reduce(size_t wave, const Terms& messages, uint8_t* result) override;
  void decode(size_t wave, int owner, const uint8_t* message) override;

 private:
  const Segment& segment(size_t wave, int owner) const {
    return chunks_[static_cast<size_t>(owner)][wave];
  }
  char* place_of(const Piece& piece) const {
    return bucket_ + (places_[piece.tensor].at + piece.begin) * element_;
  }
  void mean(const Terms& addends, size_t count, char* out) const;

  const std::vector<BucketPlace> places_;
  const DType dtype_;
  const size_t element_;
  const int rank_;
  const int size_;
  const std::vector<Chunk> chunks_;
  char* bucket_ = nullptr;
};

}  // namespace qsgd
