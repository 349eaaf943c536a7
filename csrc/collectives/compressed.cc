#include "collectives/compressed.h"

#include <algorithm>

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

bool collect(std::vector<ReceiveWindow>& windows, Terms& terms) {
  for (ReceiveWindow& from : windows) {
    const uint8_t* const message = from.ready();
    if (message == nullptr) return false;
    terms[static_cast<size_t>(from.peer()) % terms.size()] = message;
  }
  return true;
}

void verify_all(const SegmentCoder& coder, const Segment& segment,
                std::vector<ReceiveWindow>& windows) {
  for (ReceiveWindow& from : windows) coder.verify(segment, from.ready(), from.peer());
}

void release_all(std::vector<ReceiveWindow>& windows) {
  for (ReceiveWindow& from : windows) from.release();
}

void Owners::add(Transport& transport, int rank, const Messages& segments, BufferPool& pool) {
  owners_.push_back({rank, segments, SendWindow(transport, {rank}, Tag::kData, segments, pool),
                     ReceiveWindow(transport, rank, Tag::kGather, segments, pool)});
}

bool Owners::send_input(SegmentCoder& coder) {
  Owner* least = nullptr;
  for (Owner& owner : owners_) {
    if (owner.sent == owner.segments.size()) continue;
    if (least != nullptr && owner.sent >= least->sent) continue;
    if (owner.inputs.slot() != nullptr) least = &owner;
  }
  if (least == nullptr) return false;
  const Segment& segment = *least->segments[least->sent++];
  coder.contribute(segment, {kOwn}, least->inputs.slot());
  least->inputs.send(segment);
  return true;
}

bool Owners::take_result(SegmentCoder& coder) {
  for (Owner& owner : owners_) {
    const uint8_t* const message = owner.results.ready();
    if (message == nullptr) continue;
    const Segment& segment = *owner.segments[owner.taken++];
    coder.verify(segment, message, owner.rank);
    coder.accept(segment, message);
    owner.results.release();
    return true;
  }
  return false;
}

bool Owners::done() const {
  return std::all_of(owners_.begin(), owners_.end(), [](const Owner& owner) {
    return owner.sent == owner.segments.size() && owner.results.finished();
  });
}

bool Owners::drained() {
  return std::all_of(owners_.begin(), owners_.end(),
                     [](Owner& owner) { return owner.inputs.drained(); });
}

}  // namespace qsgd
