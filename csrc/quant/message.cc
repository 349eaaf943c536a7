#include "quant/message.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "common/error.h"
#include "quant/kernels.h"
#include "quant/wire.h"

namespace qsgd {
namespace {

constexpr size_t kGroup = 1 << 14;       // elements coded before their codes are hashed
constexpr size_t kLeastShare = 1 << 18;  // elements: less is not worth another thread

struct Range {
  size_t begin;
  size_t end;
};

// Whole buckets, `parts` ranges of nearly equal size.
Range share(size_t count, uint32_t bucket, size_t parts, size_t part) {
  const size_t buckets = (count + bucket - 1) / bucket;
  const auto edge = [&](size_t i) { return std::min(count, buckets * i / parts * bucket); };
  return {edge(part), edge(part + 1)};
}

size_t parts_for(size_t count, const Workers& workers) {
  return std::clamp<size_t>(count / kLeastShare, 1, static_cast<size_t>(workers.threads()));
}

uint64_t term_of(const uint8_t* body, size_t size, size_t block) {
  const size_t at = block * kHashBlock;
  return checksum_term(body + at, std::min(kHashBlock, size - at), block);
}

// Calls use(block) for the blocks of the body that lie within the codes of none of the ranges.
template <class Use>
void each_seam(size_t count, const CodecSpec& spec, size_t parts, const Use& use) {
  const size_t codes_at = spec.scales(count) * sizeof(float);
  const size_t blocks = (spec.bytes(count) + kHashBlock - 1) / kHashBlock;
  size_t block = 0;
  for (size_t part = 0; part < parts; ++part) {
    const Range range = share(count, spec.bucket, parts, part);
    const size_t begin = codes_at + spec.code_bytes(range.begin);
    for (; block * kHashBlock < begin; ++block) use(block);
    block = std::max(block, (codes_at + spec.code_bytes(range.end)) / kHashBlock);
  }
  for (; block < blocks; ++block) use(block);
}

// Sums the hashes of the blocks that lie within the codes of a range, while they are in the caches.
class BlockSum {
 public:
  BlockSum(const uint8_t* body, size_t begin)
      : body_(body), block_((begin + kHashBlock - 1) / kHashBlock) {}

  // All before `end` is written.
  void reached(size_t end) {
    for (; (block_ + 1) * kHashBlock <= end; ++block_) {
      sum_ += checksum_term(body_ + block_ * kHashBlock, kHashBlock, block_);
    }
  }
  uint64_t sum() const { return sum_; }

 private:
  const uint8_t* const body_;
  size_t block_;
  uint64_t sum_ = 0;
};

}  // namespace

size_t message_bytes(size_t count, const CodecSpec& spec) {
  return sizeof(WireHeader) + spec.bytes(count);
}

bool encode_message(const void* x, DType dtype, size_t count, const CodecSpec& spec,
                    const NoiseKey& key, uint8_t* message, Workers& workers) {
  uint8_t* const body = message + sizeof(WireHeader);
  const size_t body_bytes = spec.bytes(count);
  const size_t codes_at = spec.scales(count) * sizeof(float);
  auto* const scales = reinterpret_cast<float*>(body);
  const auto* const in = static_cast<const uint8_t*>(x);
  const size_t group = std::max<size_t>(spec.bucket, kGroup / spec.bucket * spec.bucket);
  const size_t parts = parts_for(count, workers);
  std::atomic<uint64_t> sum{checksum_of_nothing(body_bytes)};
  std::atomic<bool> finite{true};
  workers.run(parts, [&](size_t part) {
    const Range range = share(count, spec.bucket, parts, part);
    BlockSum blocks(body, codes_at + spec.code_bytes(range.begin));
    for (size_t at = range.begin; at < range.end; at += group) {
      const size_t size = std::min(group, range.end - at);
      if (!encode(in + at * facts(dtype).size, dtype, size, at, spec, key, scales + spec.scales(at),
                  body + codes_at + spec.code_bytes(at))) {
        finite = false;
      }
      blocks.reached(codes_at + spec.code_bytes(at + size));
    }
    sum += blocks.sum();
  });
  // The blocks that hold scales, or an edge between ranges.
  uint64_t rest = 0;
  each_seam(count, spec, parts, [&](size_t block) { rest += term_of(body, body_bytes, block); });
  write_header(message, spec, count, sum + rest);
  return finite;
}

void decode_message(const uint8_t* message, size_t size, size_t count, const CodecSpec& spec,
                    void* out, DType dtype, bool add, Workers& workers) {
  if (add && dtype != DType::kFloat32) throw usage_error("only float32 can be added to");
  const uint64_t wanted = verify_header(message, size, spec, count, 0);
  // A sealed message may still be of another length: of several tensors, for one.
  if (size != message_bytes(count, spec)) {
    throw internal_error("a message of " + std::to_string(size) + " bytes for " +
                         std::to_string(count) + " elements of " + describe(spec) +
                         ", which take " + std::to_string(message_bytes(count, spec)) +
                         ": decode its tensors one by one");
  }
  const uint8_t* const body = message + sizeof(WireHeader);
  const size_t body_bytes = size - sizeof(WireHeader);
  const size_t parts = parts_for(count, workers);
  std::atomic<uint64_t> sum{checksum_of_nothing(body_bytes)};
  const size_t blocks = (body_bytes + kHashBlock - 1) / kHashBlock;
  workers.run(parts, [&](size_t part) {
    uint64_t mine = 0;
    for (size_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block) {
      mine += term_of(body, body_bytes, block);
    }
    sum += mine;
  });
  verify_checksum(sum, wanted, 0);  // before any value is written
  const auto* const scales = reinterpret_cast<const float*>(body);
  const uint8_t* const codes = body + spec.scales(count) * sizeof(float);
  workers.run(parts, [&](size_t part) {
    const Range range = share(count, spec.bucket, parts, part);
    const float* const from = scales + spec.scales(range.begin);
    const uint8_t* const bytes = codes + spec.code_bytes(range.begin);
    auto* const to = static_cast<uint8_t*>(out) + range.begin * facts(dtype).size;
    if (add) {
      decode_add(from, bytes, range.end - range.begin, spec, reinterpret_cast<float*>(to));
    } else {
      decode(from, bytes, range.end - range.begin, spec, to, dtype);
    }
  });
}

}  // namespace qsgd
