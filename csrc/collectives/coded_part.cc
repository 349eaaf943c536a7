#include <utility>

#include "collectives/bucket_part.h"

namespace qsgd {
namespace {

class CodedPart final : public BucketPart {
 public:
  CodedPart(std::vector<ReduceTensor> tensors, std::vector<BucketPlace> places,
            const ReduceArgs& args, uint64_t seed, int rank, int size, size_t limit,
            Workers* workers)
      : BucketPart(std::move(places), args.dtype, rank, chunks_of(tensors, size, limit)),
        tensors_(std::move(tensors)),
        coder_(make_coder(tensors_, args, seed, rank, size, workers)) {}

  void begin(char* bucket, const std::vector<uint32_t>& steps) override {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      ReduceTensor& tensor = tensors_[t];
      tensor.out = bucket + places_[t].at * element_;
      tensor.in = tensor.out;
      tensor.step = steps[places_[t].index];
      tensor.coding_error = 0;
      tensor.coded_energy = 0;
    }
  }

  void encode(size_t wave, int owner, uint8_t* message) override {
    coder_->contribute(segment(wave, owner), {kOwn}, message);
  }

  void reduce(size_t wave, const Terms& messages, uint8_t* result) override {
    const Segment& mine = segment(wave, rank_);
    for (size_t rank = 0; rank < messages.size(); ++rank) {
      if (messages[rank] != kOwn) coder_->verify(mine, messages[rank], static_cast<int>(rank));
    }
    coder_->conclude(mine, messages, result);
  }

  void decode(size_t wave, int owner, const uint8_t* message) override {
    coder_->verify(segment(wave, owner), message, owner);
    coder_->accept(segment(wave, owner), message);
  }

  Quality quality() const override {
    Quality all;
    for (const ReduceTensor& tensor : tensors_) {
      all += Quality{tensor.coding_error, tensor.coded_energy};
    }
    return all;
  }

 private:
  size_t message_bytes(const Segment& segment) const override { return segment.bytes; }

  std::vector<ReduceTensor> tensors_;
  const std::unique_ptr<SegmentCoder> coder_;
};

}  // namespace

std::unique_ptr<BucketPart> coded_part(std::vector<ReduceTensor> tensors,
                                       std::vector<BucketPlace> places, const ReduceArgs& args,
                                       uint64_t seed, int rank, int size, size_t limit,
                                       Workers* workers) {
  return std::make_unique<CodedPart>(std::move(tensors), std::move(places), args, seed, rank, size,
                                     limit, workers);
}

}  // namespace qsgd
