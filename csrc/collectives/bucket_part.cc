#include "collectives/bucket_part.h"

#include <algorithm>
#include <cstring>

#include "collectives/tree_sum.h"
#include "quant/convert.h"
#include "quant/kernels.h"

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

constexpr size_t kSumBlock = 2048;  // elements summed at a time, in the L1 cache

class PlainPart final : public BucketPart {
 public:
  PlainPart(const std::vector<ReduceTensor>& tensors, std::vector<BucketPlace> places, DType dtype,
            int rank, int size, size_t limit)
      : BucketPart(std::move(places), dtype, rank, chunks_of(tensors, size, limit)),
        dtype_(dtype),
        size_(size) {}

  void begin(char* bucket, const std::vector<uint32_t>& /*steps*/) override { bucket_ = bucket; }

  void encode(size_t wave, int owner, uint8_t* message) override {
    for (const Piece& piece : segment(wave, owner).pieces) {
      std::memcpy(message, place_of(piece), piece.count * element_);
      message += piece.count * element_;
    }
  }

  void reduce(size_t wave, const Terms& messages, uint8_t* result) override {
    size_t at = 0;
    for (const Piece& piece : segment(wave, rank_).pieces) {
      char* const own = place_of(piece);
      Terms addends(messages);
      for (const uint8_t*& addend : addends) {
        addend = addend == kOwn ? reinterpret_cast<const uint8_t*>(own) : addend + at;
      }
      mean(addends, piece.count, own);
      std::memcpy(result + at, own, piece.count * element_);
      at += piece.count * element_;
    }
  }

  void decode(size_t wave, int owner, const uint8_t* message) override {
    for (const Piece& piece : segment(wave, owner).pieces) {
      std::memcpy(place_of(piece), message, piece.count * element_);
      message += piece.count * element_;
    }
  }

 private:
  size_t message_bytes(const Segment& segment) const override { return segment.count * element_; }
  char* place_of(const Piece& piece) const {
    return bucket_ + (places_[piece.tensor].at + piece.begin) * element_;
  }

  // out[i] = sum over ranks / ranks. `out` may be one of the addends.
  void mean(const Terms& addends, size_t count, char* out) const {
    if (dtype_ == DType::kFloat32 || dtype_ == DType::kFloat64) {
      TreeSum sum(dtype_, ReduceOp::kSum, size_);
      sum.run(
          count,
          [&](int rank) {
            return reinterpret_cast<const char*>(addends[static_cast<size_t>(rank)]);
          },
          [&](size_t at, size_t part, const void* block) {
            scale_copy(out + at * element_, block, part, dtype_, 1, size_);
          });
      return;
    }
    float sum[kSumBlock], addend[kSumBlock];
    for (size_t at = 0; at < count; at += kSumBlock) {
      const size_t part = std::min(kSumBlock, count - at);
      float32_from(addends[0] + at * element_, dtype_, part, sum);
      for (size_t rank = 1; rank < addends.size(); ++rank) {
        float32_from(addends[rank] + at * element_, dtype_, part, addend);
        kernels().add(sum, addend, part);
      }
      scale_floats(1.0f / static_cast<float>(size_), part, sum);
      float32_to(sum, part, dtype_, out + at * element_);
    }
  }

  const DType dtype_;
  const int size_;
  char* bucket_ = nullptr;
};

}  // namespace

CodecSpec plain_cut() {
  CodecSpec spec;
  spec.bucket = kTile;
  return spec;
}

std::unique_ptr<BucketPart> coded_part(std::vector<ReduceTensor> tensors,
                                       std::vector<BucketPlace> places, const ReduceArgs& args,
                                       uint64_t seed, int rank, int size, size_t limit,
                                       Workers* workers) {
  return std::make_unique<CodedPart>(std::move(tensors), std::move(places), args, seed, rank, size,
                                     limit, workers);
}

std::unique_ptr<BucketPart> plain_part(const std::vector<ReduceTensor>& tensors,
                                       std::vector<BucketPlace> places, DType dtype, int rank,
                                       int size, size_t limit) {
  return std::make_unique<PlainPart>(tensors, std::move(places), dtype, rank, size, limit);
}

}  // namespace qsgd
