// Exact allreduce on a ring: 2 (p-1)/p of the bytes per rank, the minimum of any algorithm
// (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009). Each element of a
// tensor is summed in rank order beginning after its owner, independent of fusion.
#include <algorithm>

#include "collectives/algorithm.h"
#include "collectives/schedule.h"
#include "common/kept.h"

namespace qsgd {
namespace {

struct Part {
  char* data;
  size_t count;
};

// Calls f(tensor, range, pointer into the chunk) for every tensor's part of every chunk.
template <class F>
void for_each_part(std::vector<ReduceTensor>& tensors, const std::vector<Part>& chunks,
                   size_t element, F&& f) {
  const int size = static_cast<int>(chunks.size());
  for (int owner = 0; owner < size; ++owner) {
    char* at = chunks[static_cast<size_t>(owner)].data;
    for (ReduceTensor& tensor : tensors) {
      const Range range = owned(tensor.count, 1, tensor.id, size, owner);
      f(tensor, range, at);
      at += range.size() * element;
    }
  }
}

// Lays the chunks out one after another, each with its part of every tensor. A single tensor is not
// copied.
std::vector<Part> lay_out(std::vector<ReduceTensor>& tensors, int size, size_t element,
                          std::vector<char>& buffer) {
  std::vector<Part> chunks;
  if (tensors.size() == 1) {
    ReduceTensor& tensor = tensors.front();
    for (int owner = 0; owner < size; ++owner) {
      const Range range = owned(tensor.count, 1, tensor.id, size, owner);
      chunks.push_back({static_cast<char*>(tensor.out) + range.begin * element, range.size()});
    }
    return chunks;
  }
  size_t total = 0;
  for (const ReduceTensor& tensor : tensors) total += tensor.count;
  buffer.resize(total * element);
  char* at = buffer.data();
  for (int owner = 0; owner < size; ++owner) {
    size_t count = 0;
    for (const ReduceTensor& tensor : tensors) {
      count += owned(tensor.count, 1, tensor.id, size, owner).size();
    }
    chunks.push_back({at, count});
    at += count * element;
  }
  return chunks;
}

constexpr size_t kAhead = 4;  // receives posted before the first is used

// One turn round the ring, in segments: while a segment is summed, later ones are in flight.
class Trip {
 public:
  // In step s this rank sends chunk (rank - s - shift) and receives the one before it.
  Trip(Transport& transport, const std::vector<Part>& chunks, size_t element, Tag tag, int shift)
      : transport_(transport), chunks_(chunks), element_(element), tag_(tag), shift_(shift) {
    size_t largest = 0;
    for (const Part& c : chunks) largest = std::max(largest, c.count);
    per_step_ = (largest + segment() - 1) / segment();
  }

  size_t segment() const { return kSegmentBytes / element_; }

  // target(turn, segment) returns the buffer to receive into; arrived(turn, segment) is called when
  // it is filled.
  template <class Target, class Arrived>
  void run(Target&& target, Arrived&& arrived) {
    const size_t turns = per_step_ * static_cast<size_t>(transport_.size() - 1);
    for (size_t t = 0; t < std::min(turns, kAhead); ++t) ask(t, target);
    if (turns > 0) send(0);
    for (size_t t = 0; t < turns; ++t) {
      // Turn t + 1 sends what arrived `per_step_` turns before it, which may be this turn.
      if (per_step_ > 1 && t + 1 < turns) send(t + 1);
      finish(receives_[t % kAhead]);
      arrived(t, received_in(t));
      if (per_step_ == 1 && t + 1 < turns) send(t + 1);
      if (t + kAhead < turns) ask(t + kAhead, target);
    }
    for (RequestPtr& request : sends_) finish(request);
  }

 private:
  Part segment_of(size_t turn, int back) const {
    const int size = transport_.size();
    const auto step = static_cast<int>(turn / per_step_);
    const int index = (transport_.rank() - step - shift_ - back + 3 * size) % size;
    const Part& chunk = chunks_[static_cast<size_t>(index)];
    const size_t begin = std::min(chunk.count, turn % per_step_ * segment());
    return {chunk.data + begin * element_, std::min(segment(), chunk.count - begin)};
  }
  Part received_in(size_t turn) const { return segment_of(turn, 1); }

  void send(size_t turn) {
    const Part from = segment_of(turn, 0);
    finish(sends_[turn % kAhead]);
    if (from.count == 0) return;
    sends_[turn % kAhead] = transport_.isend((transport_.rank() + 1) % transport_.size(), tag_,
                                             from.data, from.count * element_);
  }

  template <class Target>
  void ask(size_t turn, Target&& target) {
    const Part into = received_in(turn);
    if (into.count == 0) return;
    const int size = transport_.size();
    receives_[turn % kAhead] = transport_.irecv((transport_.rank() + size - 1) % size, tag_,
                                                target(turn, into), into.count * element_);
  }

  void finish(RequestPtr& request) {
    if (request == nullptr) return;
    transport_.wait(request);
    request = nullptr;
  }

  Transport& transport_;
  const std::vector<Part>& chunks_;
  const size_t element_;
  const Tag tag_;
  const int shift_;
  size_t per_step_ = 0;
  RequestPtr receives_[kAhead], sends_[kAhead];
};

void ring(Communicator& communicator, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
          uint64_t /*seed*/) {
  Transport& transport = communicator.transport;
  const int size = transport.size();
  const size_t element = facts(args.dtype).size;
  KeptOnFailure<std::vector<char>> buffer;
  const std::vector<Part> chunks = lay_out(tensors, size, element, *buffer);
  for_each_part(tensors, chunks, element, [&](ReduceTensor& t, const Range& range, char* at) {
    const char* from = static_cast<const char*>(t.in) + range.begin * element;
    t.input_finite &= scale_copy(at, from, range.size(), args.dtype, args.prescale, 1);
  });

  KeptOnFailure<std::vector<char>> incoming;
  Trip scatter(transport, chunks, element, Tag::kData, 1);
  if (size > 1) incoming->resize(kAhead * scatter.segment() * element);
  const auto place = [&](size_t turn) {
    return incoming->data() + turn % kAhead * scatter.segment() * element;
  };
  scatter.run([&](size_t turn, const Part&) { return place(turn); },
              [&](size_t turn, const Part& c) {
                reduce_into(c.data, place(turn), c.count, args.dtype, args.op);
              });
  Trip gather(transport, chunks, element, Tag::kGather, 0);
  gather.run([](size_t, const Part& c) { return c.data; }, [](size_t, const Part&) {});

  const int divisor = args.op == ReduceOp::kAverage ? size : 1;
  for_each_part(tensors, chunks, element, [&](ReduceTensor& t, const Range& range, char* at) {
    char* to = static_cast<char*>(t.out) + range.begin * element;
    t.result_finite &= scale_copy(to, at, range.size(), args.dtype, args.postscale, divisor);
  });
}

}  // namespace

const AlgorithmTraits& ring_algorithm() {
  static constexpr AlgorithmTraits traits{
      "ring", kExact, ring, [](const Layout& layout, size_t count, double width) {
        const double p = layout.ranks, bytes = static_cast<double>(count) * width;
        Load load;
        load.messages = 2 * (p - 1);
        load.wire_bytes = 2 * (p - 1) / p * bytes;
        load.added_bytes = (p - 1) / p * bytes;
        return load;
      }};
  return traits;
}

}  // namespace qsgd
