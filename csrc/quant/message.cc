#include "quant/message.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "common/error.h"
#include "quant/kernels.h"
#include "quant/wire.h"

namespace qsgd {
namespace {

// Elements that are coded, then hashed; few, so that memory is accessed continuously.
constexpr size_t kGroup = 1 << 11;
constexpr size_t kLeastShare = 1 << 18;  // elements: fewer are not worth another thread

struct Range {
  size_t begin;
  size_t end;
};

// Complete buckets, divided into `parts` ranges of nearly equal size.
Range share(size_t count, uint32_t bucket, size_t parts, size_t part) {
  const size_t buckets = (count + bucket - 1) / bucket;
  const auto edge = [&](size_t i) { return std::min(count, buckets * i / parts * bucket); };
  return {edge(part), edge(part + 1)};
}

size_t parts_for(size_t count, const Workers& workers) {
  return std::clamp<size_t>(count / kLeastShare, 1, static_cast<size_t>(workers.threads()));
}

// Calls use(at, size) for groups of complete buckets of the range.
template <class Use>
void each_group(const Range& range, uint32_t bucket, const Use& use) {
  const size_t group = std::max<size_t>(bucket, kGroup / bucket * bucket);
  for (size_t at = range.begin; at < range.end; at += group) {
    use(at, std::min(group, range.end - at));
  }
}

// Sum of the terms of blocks that are not within the codes of one range: those with scales, or with
// the boundary of two ranges.
uint64_t sum_of_seams(const uint8_t* body, size_t count, const CodecSpec& spec, size_t parts) {
  const size_t body_bytes = spec.bytes(count);
  const size_t codes_at = spec.scales(count) * sizeof(float);
  const size_t blocks = (body_bytes + kHashBlock - 1) / kHashBlock;
  uint64_t sum = 0;
  size_t block = 0;
  const auto take_up_to = [&](size_t end) {
    for (; block < end; ++block) {
      const size_t at = block * kHashBlock;
      sum += checksum_term(body + at, std::min(kHashBlock, body_bytes - at), block);
    }
  };
  for (size_t part = 0; part < parts; ++part) {
    const Range range = share(count, spec.bucket, parts, part);
    const size_t begin = codes_at + spec.code_bytes(range.begin);
    take_up_to((begin + kHashBlock - 1) / kHashBlock);
    block = std::max(block, (codes_at + spec.code_bytes(range.end)) / kHashBlock);
  }
  take_up_to(blocks);
  return sum;
}

}  // namespace

size_t message_bytes(size_t count, const CodecSpec& spec) {
  return sizeof(WireHeader) + spec.bytes(count);
}

bool encode_message(const void* x, DType dtype, size_t count, const CodecSpec& spec,
                    const NoiseKey& key, uint8_t* message, Workers& workers, float by,
                    float* left) {
  uint8_t* const body = message + sizeof(WireHeader);
  const size_t body_bytes = spec.bytes(count);
  const size_t codes_at = spec.scales(count) * sizeof(float);
  auto* const scales = reinterpret_cast<float*>(body);
  const auto* const in = static_cast<const uint8_t*>(x);
  const size_t parts = parts_for(count, workers);
  std::atomic<uint64_t> sum{checksum_of_nothing(body_bytes)};
  std::atomic<bool> finite{true};
  workers.run(parts, [&](size_t part) {
    const Range range = share(count, spec.bucket, parts, part);
    BlockHash hash(body, codes_at + spec.code_bytes(range.begin));
    each_group(range, spec.bucket, [&](size_t at, size_t size) {
      const uint8_t* const from = in + at * facts(dtype).size;
      float* const scale = scales + spec.scales(at);
      uint8_t* const codes = body + codes_at + spec.code_bytes(at);
      const bool good = left == nullptr ? encode(from, dtype, size, at, spec, key, scale, codes)
                                        : encode_keeping(from, dtype, by, size, at, spec, key,
                                                         scale, codes, left + at);
      if (!good) finite = false;
      hash.reach(codes_at + spec.code_bytes(at + size));
    });
    sum += hash.sum();
  });
  write_header(message, spec, count, sum + sum_of_seams(body, count, spec, parts));
  return finite;
}

void decode_message(const uint8_t* message, size_t size, size_t count, const CodecSpec& spec,
                    void* out, DType dtype, bool add, Workers& workers) {
  if (add && dtype != DType::kFloat32) throw usage_error("only float32 can be added to");
  const uint64_t wanted = verify_header(message, size, spec, count, 0);
  // A valid message may still have another length, for example that of several tensors.
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
  const auto* const scales = reinterpret_cast<const float*>(body);
  const size_t codes_at = spec.scales(count) * sizeof(float);
  workers.run(parts, [&](size_t part) {
    const Range range = share(count, spec.bucket, parts, part);
    BlockHash hash(body, codes_at + spec.code_bytes(range.begin));
    each_group(range, spec.bucket, [&](size_t at, size_t elements) {
      hash.reach(codes_at + spec.code_bytes(at + elements));
      const uint8_t* const codes = body + codes_at + spec.code_bytes(at);
      uint8_t* const to = static_cast<uint8_t*>(out) + at * facts(dtype).size;
      if (add) {
        decode_add(scales + spec.scales(at), codes, elements, spec, reinterpret_cast<float*>(to));
      } else {
        decode(scales + spec.scales(at), codes, elements, spec, to, dtype);
      }
    });
    sum += hash.sum();
  });
  verify_checksum(sum + sum_of_seams(body, count, spec, parts), wanted, 0);
}

}  // namespace qsgd
