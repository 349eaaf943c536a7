#include "collectives/reducescatter.h"

#include <algorithm>

#include "collectives/exchange.h"
#include "collectives/schedule.h"
#include "collectives/tree_sum.h"
#include "common/error.h"
#include "common/kept.h"

namespace qsgd {
namespace {

class ReduceScatter {
 public:
  ReduceScatter(Transport& transport, const void* in, void* out, const std::vector<size_t>& counts,
                const ReduceArgs& args)
      : transport_(transport),
        in_(static_cast<const char*>(in)),
        out_(static_cast<char*>(out)),
        counts_(counts),
        starts_(starts_of(counts)),
        args_(args),
        sum_(args.dtype, args.op, transport.size()),
        element_(facts(args.dtype).size),
        segment_(kSegmentBytes / element_) {}

  bool run() {
    const size_t largest = *std::max_element(counts_.begin(), counts_.end());
    const size_t segments = (largest + segment_ - 1) / segment_;
    for (size_t k = 0; k < segments + 1; ++k) {
      if (k < segments) send(k);
      if (k > 0) reduce(k - 1);
    }
    return finite_;
  }

 private:
  struct Turn {
    std::vector<char> addends, outgoing;
    std::vector<RequestPtr> receives, sends;
  };
  Turn& turn(size_t segment) { return (*turns_)[segment % 2]; }
  size_t size_of(int rank, size_t segment) const {
    const size_t count = counts_[static_cast<size_t>(rank)];
    return std::min(segment_, count - std::min(count, segment * segment_));
  }
  const char* input(int rank, size_t segment) const {
    return in_ + (starts_[static_cast<size_t>(rank)] + segment * segment_) * element_;
  }
  char* place(std::vector<char>& buffer, int rank) const {
    buffer.resize(static_cast<size_t>(transport_.size()) * segment_ * element_);
    return buffer.data() + static_cast<size_t>(rank) * segment_ * element_;
  }

  void send(size_t k) {
    Turn& t = turn(k);
    const size_t mine = size_of(transport_.rank(), k);
    for_others(transport_, [&](int peer) {
      if (mine == 0) return;
      t.receives.push_back(
          transport_.irecv(peer, Tag::kData, place(t.addends, peer), mine * element_));
    });
    for_others(transport_, [&](int peer) {
      const size_t count = size_of(peer, k);
      if (count == 0) return;
      const char* from = input(peer, k);
      if (args_.prescale != 1) {
        char* const scaled = place(t.outgoing, peer);
        scale_copy(scaled, from, count, args_.dtype, args_.prescale, 1);
        from = scaled;
      }
      t.sends.push_back(transport_.isend(peer, Tag::kData, from, count * element_));
    });
  }

  void reduce(size_t k) {
    Turn& t = turn(k);
    const int rank = transport_.rank(), size = transport_.size();
    const size_t mine = size_of(rank, k);
    if (mine > 0) {
      scale_copy(place(t.addends, rank), input(rank, k), mine, args_.dtype, args_.prescale, 1);
    }
    transport_.wait(t.receives);
    sum_.run(
        mine, [&](int from) { return place(t.addends, from); },
        [&](size_t at, size_t count, const void* block) {
          finite_ &= scale_copy(out_ + (k * segment_ + at) * element_, block, count, args_.dtype,
                                args_.postscale, args_.op == ReduceOp::kAverage ? size : 1);
        });
    transport_.wait(t.sends);
  }

  Transport& transport_;
  const char* const in_;
  char* const out_;
  const std::vector<size_t>& counts_;
  const std::vector<size_t> starts_;
  const ReduceArgs& args_;
  TreeSum sum_;
  const size_t element_;
  const size_t segment_;
  bool finite_ = true;
  KeptOnFailure<std::vector<Turn>> turns_{std::vector<Turn>(2)};
};

}  // namespace

bool reducescatter(Transport& transport, const void* in, void* out,
                   const std::vector<size_t>& counts, const ReduceArgs& args) {
  if (args.op == ReduceOp::kAdasum) {
    throw usage_error(
        "reducescatter cannot reduce by Adasum, which needs whole tensors; use allreduce, or "
        "op=Average");
  }
  return ReduceScatter(transport, in, out, counts, args).run();
}

}  // namespace qsgd
