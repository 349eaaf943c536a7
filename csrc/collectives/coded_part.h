// The tensors of a bucket that share a code.
#pragma once

#include "collectives/bucket_part.h"

namespace qsgd {

class CodedPart : public BucketPart {
 public:
  // `tensors` need no memory yet; begin() sets it. `limit`: maximum number of elements of a
  // message.
  CodedPart(std::vector<ReduceTensor> tensors, std::vector<BucketPlace> places,
            const ReduceArgs& args, uint64_t seed, int rank, int size, size_t limit,
            Workers* workers);

  void begin(char* bucket, const std::vector<uint32_t>& steps) override;
  size_t waves(int owner) const override { return chunk(owner).size(); }
  size_t bytes(size_t wave, int owner) const override;
  void encode(size_t wave, int owner, uint8_t* message) override;
  void reduce(size_t wave, const Terms& messages, uint8_t* result) override;
  void decode(size_t wave, int owner, const uint8_t* message) override;
  Quality quality() const override;

 private:
  const Chunk& chunk(int owner) const { return chunks_[static_cast<size_t>(owner)]; }

  std::vector<ReduceTensor> tensors_;
  const std::vector<BucketPlace> places_;
  const size_t element_;
  const int rank_;
  const std::vector<Chunk> chunks_;
  const std::unique_ptr<SegmentCoder> coder_;
};

}  // namespace qsgd
