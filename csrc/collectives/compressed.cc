#include "collectives/compressed.h"

namespace qsgd {

std::vector<int> ranks_behind(int rank, int size) {
  std::vector<int> ranks;
  for (int hop = 1; hop < size; ++hop) ranks.push_back((rank + hop) % size);
  return ranks;
}

void reduce_alone(SegmentCoder& coder, std::vector<ReduceTensor>& tensors, const ReduceArgs& args) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    ReduceTensor& t = tensors[i];
    if (t.residual == nullptr && t.owner_residual == nullptr) {  // in the tensor's precision
      t.input_finite = t.result_finite =
          scale_copy(t.out, t.in, t.count, args.dtype, args.prescale * args.postscale, 1);
    } else {
      const std::vector<ReduceTensor> one{t};
      for (Segment& segment : chunk_of(one, 1, 0, t.count)) {
        segment.pieces.front().tensor = i;
        coder.deliver(segment, {kOwn});
      }
    }
  }
}

}  // namespace qsgd
