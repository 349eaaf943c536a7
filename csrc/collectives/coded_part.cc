#include "collectives/coded_part.h"

#include <utility>

namespace qsgd {

CodedPart::CodedPart(std::vector<ReduceTensor> tensors, std::vector<BucketPlace> places,
                     const ReduceArgs& args, uint64_t seed, int rank, int size, size_t limit,
                     Workers* workers)
    : tensors_(std::move(tensors)),
      places_(std::move(places)),
      element_(facts(args.dtype).size),
      rank_(rank),
      chunks_(chunks_of(tensors_, size, limit)),
      coder_(make_coder(tensors_, args, seed, rank, size, workers)) {}

void CodedPart::begin(char* bucket, const std::vector<uint32_t>& steps) {
  for (size_t t = 0; t < tensors_.size(); ++t) {
    ReduceTensor& tensor = tensors_[t];
    tensor.out = bucket + places_[t].at * element_;
    tensor.in = tensor.out;
    tensor.step = steps[places_[t].index];
    tensor.coding_error = 0;
    tensor.coded_energy = 0;
  }
}

size_t CodedPart::bytes(size_t wave, int owner) const {
  return wave < chunk(owner).size() ? chunk(owner)[wave].bytes : 0;
}

void CodedPart::encode(size_t wave, int owner, uint8_t* message) {
  coder_->contribute(chunk(owner)[wave], {kOwn}, message);
}

void CodedPart::reduce(size_t wave, const Terms& messages, uint8_t* result) {
  const Segment& segment = chunk(rank_)[wave];
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    if (messages[rank] != kOwn) coder_->verify(segment, messages[rank], static_cast<int>(rank));
  }
  coder_->conclude(segment, messages, result);
}

void CodedPart::decode(size_t wave, int owner, const uint8_t* message) {
  const Segment& segment = chunk(owner)[wave];
  coder_->verify(segment, message, owner);
  coder_->accept(segment, message);
}

Quality CodedPart::quality() const {
  Quality all;
  for (const ReduceTensor& tensor : tensors_) {
    all += Quality{tensor.coding_error, tensor.coded_energy};
  }
  return all;
}

}  // namespace qsgd
