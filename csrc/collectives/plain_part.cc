#include "collectives/plain_part.h"

#include <cstring>
#include <utility>

#include "collectives/tree_sum.h"

namespace qsgd {
namespace {

constexpr size_t kSumBlock = 2048;  // elements summed at a time, in the L1 cache

}  // namespace

CodecSpec plain_cut() {
  CodecSpec spec;
  spec.bucket = kTile;
  return spec;
}

PlainPart::PlainPart(const std::vector<ReduceTensor>& tensors, std::vector<BucketPlace> places,
                     DType dtype, int rank, int size, size_t limit)
    : places_(std::move(places)),
      dtype_(dtype),
      element_(facts(dtype).size),
      rank_(rank),
      size_(size),
      chunks_(chunks_of(tensors, size, limit)) {}

size_t PlainPart::bytes(size_t wave, int owner) const {
  return wave < waves(owner) ? segment(wave, owner).count * element_ : 0;
}

void PlainPart::encode(size_t wave, int owner, uint8_t* message) {
  for (const Piece& piece : segment(wave, owner).pieces) {
    std::memcpy(message, place_of(piece), piece.count * element_);
    message += piece.count * element_;
  }
}

void PlainPart::reduce(size_t wave, const Terms& messages, uint8_t* result) {
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

// out[i] = sum over ranks / ranks. `out` may be one of the addends.
void PlainPart::mean(const Terms& addends, size_t count, char* out) const {
  if (dtype_ == DType::kFloat32 || dtype_ == DType::kFloat64) {
    TreeSum(dtype_, ReduceOp::kSum, size_)
        .run(
            count,
            [&](int rank) {
              return reinterpret_cast<const char*>(addends[static_cast<size_t>(rank)]);
            },
            [&](size_t at, size_t part, const void* sum) {
              scale_copy(out + at * element_, sum, part, dtype_, 1, size_);
            });
    return;
  }
  float sum[kSumBlock], addend[kSumBlock];
  for (size_t at = 0; at < count; at += kSumBlock) {
    const size_t part = std::min(kSumBlock, count - at);
    to_floats(addends[0] + at * element_, dtype_, part, sum);
    for (size_t rank = 1; rank < addends.size(); ++rank) {
      to_floats(addends[rank] + at * element_, dtype_, part, addend);
      add_floats(addend, part, sum);
    }
    scale_floats(1.0f / static_cast<float>(size_), part, sum);
    from_floats(sum, part, dtype_, out + at * element_);
  }
}

void PlainPart::decode(size_t wave, int owner, const uint8_t* message) {
  for (const Piece& piece : segment(wave, owner).pieces) {
    std::memcpy(place_of(piece), message, piece.count * element_);
    message += piece.count * element_;
  }
}

}  // namespace qsgd
