#include "quant/message.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "common/error.h"
#include "common/range.h"
#include "quant/kernels.h"
#include "quant/wire.h"

namespace qsgd {
namespace {

// Elements that are coded, then hashed; few, so that memory is accessed continuously.
constexpr size_t kGroup = 1 << 11;
constexpr size_t kLeastShare = 1 << 18;  // elements: fewer are not worth another thread

// Sum of the terms of blocks that are not within the codes of one range: those with scales, or with
// the boundary of two ranges.
uint64_t sum_of_seams(const uint8_t* body, size_t count, const CodecSpec& spec, int parts) {
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
  for (int part = 0; part < parts; ++part) {
    const Range range = part_of(count, spec.bucket, parts, part);
    const size_t begin = codes_at + spec.code_bytes(range.begin);
    take_up_to((begin + kHashBlock - 1) / kHashBlock);
    block = std::max(block, (codes_at + spec.code_bytes(range.end)) / kHashBlock);
  }
  take_up_to(blocks);
  return sum;
}

// Calls use(at, size, scales_at, codes_at) for groups of complete buckets, on all threads, and
// hashes the codes meanwhile: before they are read, or after they are written. The positions are
// in the body. Returns its checksum.
template <bool kWrites, class Use>
uint64_t pass_over(const uint8_t* body, size_t count, const CodecSpec& spec, Workers& workers,
                   const Use& use) {
  const size_t codes_at = spec.scales(count) * sizeof(float);
  const size_t group = std::max<size_t>(spec.bucket, kGroup / spec.bucket * spec.bucket);
  const int parts = static_cast<int>(
      std::clamp<size_t>(count / kLeastShare, 1, static_cast<size_t>(workers.threads())));
  std::atomic<uint64_t> sum{checksum_of_nothing(spec.bytes(count))};
  workers.run(static_cast<size_t>(parts), [&](size_t part) {
    const Range range = part_of(count, spec.bucket, parts, static_cast<int>(part));
    BlockHash hash(body, codes_at + spec.code_bytes(range.begin));
    for (size_t at = range.begin; at < range.end; at += group) {
      const size_t size = std::min(group, range.end - at);
      const size_t end = codes_at + spec.code_bytes(at + size);
      if (!kWrites) hash.reach(end);
      use(at, size, spec.scales(at) * sizeof(float), codes_at + spec.code_bytes(at));
      if (kWrites) hash.reach(end);
    }
    sum += hash.sum();
  });
  return sum + sum_of_seams(body, count, spec, parts);
}

}  // namespace

size_t message_bytes(size_t count, const CodecSpec& spec) {
  return sizeof(WireHeader) + spec.bytes(count);
}

bool encode_message(const void* x, DType dtype, size_t count, const CodecSpec& spec,
                    const NoiseKey& key, uint8_t* message, Workers& workers, float by,
                    float* left) {
  uint8_t* const body = message + sizeof(WireHeader);
  const auto* const in = static_cast<const uint8_t*>(x);
  std::atomic<bool> finite{true};
  const auto code = [&](size_t at, size_t size, size_t scales_at, size_t codes_at) {
    const uint8_t* const from = in + at * facts(dtype).size;
    auto* const scales = reinterpret_cast<float*>(body + scales_at);
    uint8_t* const codes = body + codes_at;
    const bool good = left == nullptr ? encode(from, dtype, size, at, spec, key, scales, codes)
                                      : encode_keeping(from, dtype, by, size, at, spec, key, scales,
                                                       codes, left + at);
    if (!good) finite = false;
  };
  write_header(message, spec, count, pass_over<true>(body, count, spec, workers, code));
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
  const auto value = [&](size_t at, size_t elements, size_t scales_at, size_t codes_at) {
    const auto* const scales = reinterpret_cast<const float*>(body + scales_at);
    uint8_t* const to = static_cast<uint8_t*>(out) + at * facts(dtype).size;
    if (add) {
      decode_add(scales, body + codes_at, elements, spec, reinterpret_cast<float*>(to));
    } else {
      decode(scales, body + codes_at, elements, spec, to, dtype);
    }
  };
  verify_checksum(pass_over<false>(body, count, spec, workers, value), wanted, 0);
}

}  // namespace qsgd
