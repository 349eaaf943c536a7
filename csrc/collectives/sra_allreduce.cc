#include "collectives/sra_allreduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "collectives/schedule.h"
#include "common/kept.h"
#include "quant/wire.h"

namespace qsgd {
namespace {

// One bucket of one tensor, and where its norm and codes lie in the message of its owner's chunk.
struct Bucket {
  size_t tensor;
  size_t begin;
  size_t count;
  size_t norm_at;  // byte offset in the message
  size_t codes_at;
};

// All buckets that one rank owns; equal on every rank.
struct Chunk {
  std::vector<Bucket> buckets;
  size_t pieces = 0;  // tensors that have a part in it
  size_t count = 0;   // elements
  size_t bytes = 0;   // of its message; 0 when it is empty and nothing is sent
};

Chunk chunk_of(const std::vector<ReduceTensor>& tensors, const QuantSpec& spec, int size,
               int owner) {
  Chunk chunk;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const Range range = owned(tensors[t].count, spec.bucket, tensors[t].id, size, owner);
    chunk.count += range.size();
    chunk.pieces += range.size() > 0;
    for (size_t at = range.begin; at < range.end; at += spec.bucket) {
      chunk.buckets.push_back({t, at, std::min<size_t>(spec.bucket, range.end - at), 0, 0});
    }
  }
  size_t norm_at = sizeof(WireHeader);
  size_t codes_at = norm_at + chunk.buckets.size() * sizeof(float);
  for (Bucket& bucket : chunk.buckets) {
    bucket.norm_at = norm_at;
    bucket.codes_at = codes_at;
    norm_at += sizeof(float);
    codes_at += spec.code_bytes(bucket.count);
  }
  chunk.bytes = chunk.buckets.empty() ? 0 : codes_at;
  return chunk;
}

using Message = std::vector<uint8_t>;
using Messages = std::vector<Message>;  // by rank

float norm_in(const Message& message, const Bucket& bucket) {
  float norm;
  std::memcpy(&norm, message.data() + bucket.norm_at, sizeof norm);
  return norm;
}

void put_norm(Message& message, const Bucket& bucket, float norm) {
  std::memcpy(message.data() + bucket.norm_at, &norm, sizeof norm);
}

class Sra {
 public:
  Sra(Transport& transport, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
      const QuantSpec& spec, uint64_t seed)
      : transport_(transport),
        tensors_(tensors),
        spec_(spec),
        seed_(seed),
        size_(transport.size()),
        rank_(transport.rank()),
        scale_(static_cast<float>(args.prescale * args.postscale /
                                  (args.op == ReduceOp::kAverage ? size_ : 1))) {
    for (int owner = 0; owner < size_; ++owner) {
      chunks_.push_back(chunk_of(tensors, spec, size_, owner));
    }
  }

  void run() {
    const std::vector<int> peers = others();
    KeptOnFailure<Messages> contributions(Messages(at(size_))), outgoing(Messages(at(size_))),
        results(Messages(at(size_)));
    std::vector<RequestPtr> receives(at(size_)), sends;
    for (const int peer : peers) receives[at(peer)] = receive(peer, mine(), *contributions);
    for (const int peer : peers) {
      (*outgoing)[at(peer)] = encode_inputs(chunks_[at(peer)]);
      send(peer, (*outgoing)[at(peer)], sends);
    }
    for (const int peer : peers) finish(receives[at(peer)], *contributions, mine(), peer);
    transport_.wait(sends);

    for (const int peer : peers) receives[at(peer)] = receive(peer, chunks_[at(peer)], *results);
    (*results)[at(rank_)] = sum_and_encode(*contributions);
    for (const int peer : peers) send(peer, (*results)[at(rank_)], sends);
    for (const int peer : peers) {
      finish(receives[at(peer)], *results, chunks_[at(peer)], peer);
      decode_result((*results)[at(peer)], chunks_[at(peer)]);
    }
    transport_.wait(sends);
  }

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }
  const Chunk& mine() const { return chunks_[at(rank_)]; }

  // The next rank first, so that not all ranks send to rank 0 at once.
  std::vector<int> others() const {
    std::vector<int> peers;
    for (int hop = 1; hop < size_; ++hop) peers.push_back((rank_ + hop) % size_);
    return peers;
  }

  RequestPtr receive(int peer, const Chunk& chunk, Messages& into) {
    if (chunk.bytes == 0) return nullptr;
    into[at(peer)].resize(chunk.bytes);
    return transport_.irecv(peer, Tag::kData, into[at(peer)].data(), chunk.bytes);
  }

  void send(int peer, const Message& message, std::vector<RequestPtr>& sends) {
    if (message.empty()) return;
    sends.push_back(transport_.isend(peer, Tag::kData, message.data(), message.size()));
  }

  void finish(RequestPtr& request, const Messages& from, const Chunk& chunk, int peer) {
    if (request == nullptr) return;
    transport_.wait(request);
    verify(from[at(peer)].data(), chunk.bytes, spec_, chunk.pieces, chunk.count, peer);
  }

  NoiseKey key(const ReduceTensor& tensor, Phase phase) const {
    return {seed_, tensor.id, tensor.step, static_cast<uint32_t>(rank_), phase};
  }

  Message encode_inputs(const Chunk& chunk) {
    Message message(chunk.bytes);
    for (const Bucket& bucket : chunk.buckets) {
      ReduceTensor& tensor = tensors_[bucket.tensor];
      const float* x = static_cast<const float*>(tensor.in) + bucket.begin;
      const float norm = encode_bucket(x, bucket.count, bucket.begin, spec_,
                                       key(tensor, Phase::kScatter), &message[bucket.codes_at]);
      tensor.input_finite &= !std::isnan(norm);
      put_norm(message, bucket, norm);
    }
    if (chunk.bytes > 0) seal(message.data(), chunk.bytes, spec_, chunk.pieces, chunk.count);
    return message;
  }

  // The owner's part: bucket by bucket, so that the sum never leaves the first-level cache.
  Message sum_and_encode(const Messages& contributions) {
    const Chunk& chunk = mine();
    Message message(chunk.bytes);
    std::vector<float> sum(spec_.bucket);
    for (const Bucket& bucket : chunk.buckets) {
      ReduceTensor& tensor = tensors_[bucket.tensor];
      const float* own = static_cast<const float*>(tensor.in) + bucket.begin;
      tensor.input_finite &= all_finite(own, bucket.count);
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int rank = 0; rank < size_; ++rank) {
        if (rank == rank_) {
          for (size_t i = 0; i < bucket.count; ++i) sum[i] += own[i];
        } else {
          const Message& from = contributions[at(rank)];
          decode_add_bucket(norm_in(from, bucket), &from[bucket.codes_at], bucket.count, spec_,
                            sum.data());
        }
      }
      for (size_t i = 0; i < bucket.count; ++i) sum[i] *= scale_;
      put_norm(message, bucket,
               encode_bucket(sum.data(), bucket.count, bucket.begin, spec_,
                             key(tensor, Phase::kGather), &message[bucket.codes_at]));
    }
    if (chunk.bytes > 0) seal(message.data(), chunk.bytes, spec_, chunk.pieces, chunk.count);
    decode_result(message, chunk);
    return message;
  }

  void decode_result(const Message& message, const Chunk& chunk) {
    for (const Bucket& bucket : chunk.buckets) {
      ReduceTensor& tensor = tensors_[bucket.tensor];
      const float norm = norm_in(message, bucket);
      tensor.result_finite &= !std::isnan(norm);
      decode_bucket(norm, &message[bucket.codes_at], bucket.count, spec_,
                    static_cast<float*>(tensor.out) + bucket.begin);
    }
  }

  Transport& transport_;
  std::vector<ReduceTensor>& tensors_;
  const QuantSpec spec_;
  const uint64_t seed_;
  const int size_;
  const int rank_;
  const float scale_;
  std::vector<Chunk> chunks_;
};

}  // namespace

void sra_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
                   const QuantSpec& spec, uint64_t seed) {
  check(spec);
  if (args.dtype != DType::kFloat32 ||
      (args.op != ReduceOp::kSum && args.op != ReduceOp::kAverage)) {
    throw usage_error(std::string("QSGD compresses sums and averages of float32, not of ") +
                      facts(args.dtype).name + "; use Compression.none for this tensor");
  }
  if (transport.size() == 1) {  // nothing travels, so nothing is rounded
    for (ReduceTensor& t : tensors) {
      t.input_finite = t.result_finite =
          scale_copy(t.out, t.in, t.count, args.dtype, args.prescale * args.postscale, 1);
    }
    return;
  }
  Sra(transport, tensors, args, spec, seed).run();
}

}  // namespace qsgd
