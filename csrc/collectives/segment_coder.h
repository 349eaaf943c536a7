// A rank's arithmetic on the segments of a compressed collective: code, sum, decode, with error
// feedback and quality. Works block by block, in the caches, on one thread or several.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "collectives/floats.h"
#include "collectives/segments.h"
#include "common/workers.h"

namespace qsgd {

// What to sum, in this order: messages of the segment, and kOwn for this rank's own input, which is
// taken as it is, without coding.
using Terms = std::vector<const uint8_t*>;
constexpr const uint8_t* kOwn = nullptr;

class SegmentCoder {
 public:
  // Throws a usage error for what cannot be compressed: integers, minima, maxima, products.
  SegmentCoder(std::vector<ReduceTensor>& tensors, const ReduceArgs& args, uint64_t seed, int rank,
               int size, Workers* workers);

  // As a worker: codes the sum, which holds the rank's own input, for an owner to add to others'.
  void contribute(const Segment& segment, const Terms& terms, uint8_t* message);
  // As the owner: scales the complete sum, codes it as the result, and decodes it into `out`.
  void conclude(const Segment& segment, const Terms& terms, uint8_t* message);
  // Writes the scaled sum to `out` without coding it once more. With kOwn among the terms, which is
  // for a rank that is alone, it sends off all residuals with it.
  void deliver(const Segment& segment, const Terms& terms);
  // Writes an owner's result to `out`.
  void accept(const Segment& segment, const uint8_t* message);
  size_t scratch_bytes() const;
  // Refuses a message that is not the segment's.
  void verify(const Segment& segment, const uint8_t* message, int sender) const;

 private:
  // A run of a piece's buckets that fits the caches.
  struct Block {
    const Piece* piece;
    size_t at;  // in the piece
    size_t count;
  };
  struct Outcome {
    bool input_finite = true;
    bool result_finite = true;
    Quality quality;
    size_t coded_count = 0, coded_bytes = 0;
  };
  // Two buffers of a block.
  struct Scratch {
    std::vector<float> sum;
    std::vector<float> other;
  };
  using Work = std::function<void(const Block&, Scratch&, Outcome&)>;

  void for_each_block(const Segment& segment, const Work& work);
  void note_time(const Segment& segment, std::chrono::steady_clock::time_point start);
  ReduceTensor& tensor_of(const Block& block) { return tensors_[block.piece->tensor]; }
  const CodecSpec& spec_of(const Block& block) const { return tensors_[block.piece->tensor].spec; }
  // Where in a message.
  size_t scales_at(const Block& block) const;
  size_t codes_at(const Block& block) const;
  const char* input(const Block& block);
  char* output(const Block& block);
  float* residual(const Block& block);
  float* owner_residual(const Block& block);
  NoiseKey key(const ReduceTensor& tensor, Phase phase) const;

  const float* own_input(const Block& block, std::vector<float>& buffer, Outcome& outcome);
  float* sum(const Block& block, const Terms& terms, Scratch& scratch, Outcome& outcome);
  bool code(const Block& block, const void* x, DType dtype, float by, Phase phase, float* left,
            uint8_t* message, Outcome& outcome);
  bool decode_block(const Block& block, const uint8_t* message, DType dtype, void* to) const;
  Quality sample(const Block& block, const void* x, DType dtype, const float* left,
                 const uint8_t* message, std::vector<float>& buffer) const;

  std::vector<ReduceTensor>& tensors_;
  const DType dtype_;
  const uint64_t seed_;
  const int rank_;
  const float scale_;
  Workers* const workers_;
  std::vector<Scratch> scratch_;  // per thread
};

}  // namespace qsgd
