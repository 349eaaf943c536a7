#include "collectives/sra_allreduce.h"

#include <algorithm>

#include "collectives/algorithm.h"
#include "collectives/compressed.h"
#include "collectives/windows.h"

namespace qsgd {
namespace {

// Three activities, each of which continues whenever its messages and buffers allow.
class Sra {
 public:
  Sra(Transport& transport, SegmentCoder& coder, const std::vector<Chunk>& chunks, BufferPool& pool)
      : coder_(coder),
        chunks_(chunks),
        mine_(chunks[static_cast<size_t>(transport.rank())]),
        // Begins with the next rank, so that not all ranks send to rank 0 at the same time.
        others_(ranks_behind(transport.rank(), transport.size())),
        results_out_(transport, others_, Tag::kGather, messages_of(mine_), kWindow, pool) {
    for (const int peer : others_) {
      const Messages theirs = messages_of(chunk_of_rank(peer));
      inputs_in_.emplace_back(transport, peer, Tag::kData, messages_of(mine_), kWindow, pool);
      results_in_.emplace_back(transport, peer, Tag::kGather, theirs, kWindow, pool);
      inputs_out_.emplace_back(transport, std::vector<int>{peer}, Tag::kData, theirs, kWindow,
                               pool);
    }
    sent_.resize(others_.size());
    taken_.resize(others_.size());
  }

  // Handles one message; returns false if none could be handled.
  bool advance() { return sum_segment() || send_input() || take_result(); }

  bool done() {
    if (summed_ < mine_.size()) return false;
    for (size_t i = 0; i < others_.size(); ++i) {
      if (sent_[i] < chunk_of_rank(others_[i]).size() || !results_in_[i].finished()) return false;
    }
    return results_out_.drained() && all_drained(inputs_out_);
  }

 private:
  const Chunk& chunk_of_rank(int rank) const { return chunks_[static_cast<size_t>(rank)]; }

  // Codes this rank's input for the owner with the fewest segments so far.
  bool send_input() {
    size_t least = others_.size();
    for (size_t i = 0; i < others_.size(); ++i) {
      if (sent_[i] == chunk_of_rank(others_[i]).size()) continue;
      if (least < others_.size() && sent_[i] >= sent_[least]) continue;
      if (inputs_out_[i].slot() != nullptr) least = i;
    }
    if (least == others_.size()) return false;
    const Segment& segment = chunk_of_rank(others_[least])[sent_[least]++];
    coder_.contribute(segment, {kOwn}, inputs_out_[least].slot());
    inputs_out_[least].send(segment);
    return true;
  }

  // The owner's work, once all ranks' codes of a segment have arrived.
  bool sum_segment() {
    if (summed_ == mine_.size()) return false;
    const Segment& segment = mine_[summed_];
    Terms terms(chunks_.size(), kOwn);
    for (ReceiveWindow& from : inputs_in_) {
      const uint8_t* const message = from.ready();
      if (message == nullptr) return false;
      terms[static_cast<size_t>(from.peer())] = message;
    }
    uint8_t* const result = results_out_.slot();
    if (result == nullptr) return false;
    for (const ReceiveWindow& from : inputs_in_) {
      coder_.verify(segment, terms[static_cast<size_t>(from.peer())], from.peer());
    }
    coder_.conclude(segment, terms, result);
    results_out_.send(segment);
    for (ReceiveWindow& from : inputs_in_) from.release();
    ++summed_;
    return true;
  }

  bool take_result() {
    for (size_t i = 0; i < others_.size(); ++i) {
      const uint8_t* const message = results_in_[i].ready();
      if (message == nullptr) continue;
      const Segment& segment = chunk_of_rank(others_[i])[taken_[i]++];
      coder_.verify(segment, message, others_[i]);
      coder_.accept(segment, message);
      results_in_[i].release();
      return true;
    }
    return false;
  }

  SegmentCoder& coder_;
  const std::vector<Chunk>& chunks_;
  const Chunk& mine_;
  const std::vector<int> others_;
  std::vector<SendWindow> inputs_out_;  // by index in others_, like the next four
  std::vector<ReceiveWindow> inputs_in_;
  std::vector<ReceiveWindow> results_in_;
  std::vector<size_t> sent_;
  std::vector<size_t> taken_;
  SendWindow results_out_;
  size_t summed_ = 0;
};

}  // namespace

void sra_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                   uint64_t seed, Workers* workers, Pipelining* pipelining) {
  run_compressed<Sra>(transport, tensors, args, seed, workers, pipelining,
                      [&](size_t limit) { return chunks_of(tensors, transport.size(), limit); });
}

const AlgorithmTraits& sra_algorithm() {
  static constexpr AlgorithmTraits traits{
      "sra", kCompresses | kAnyPlace,
      [](Communicator& c, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
         uint64_t seed) {
        sra_allreduce(c.transport, tensors, args, seed, c.workers, c.pipelining);
      },
      [](const Layout& layout, size_t count, double width) {
        const double p = layout.ranks, n = static_cast<double>(count);
        Load load;
        load.messages = 2 * (p - 1);
        load.wire_bytes = 2 * (p - 1) / p * n * width;
        load.encoded = n;  // the codes for the owners, and of the owner's sum
        load.decoded_and_added = (p - 1) / p * n;
        load.decoded = n;
        return load;
      }};
  return traits;
}

}  // namespace qsgd
