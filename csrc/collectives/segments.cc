#include "collectives/segments.h"

#include <algorithm>

#include "collectives/schedule.h"
#include "quant/code.h"

namespace qsgd {
namespace {

// As float32 it fits in the caches. Shorter messages cost more than their pipelining saves: coding
// this many elements takes about 0.1 ms, a message over TCP up to that.
constexpr size_t kUsual = size_t{1} << 18;

// Header entry for pieces with different codes: a digest, different from every code and from other
// mixtures, so that ranks which disagree refuse each other's messages.
CodecSpec digest_of(const std::vector<ReduceTensor>& tensors, const std::vector<Piece>& pieces) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const Piece& piece : pieces) {
    const CodecSpec& spec = tensors[piece.tensor].spec;
    for (const uint32_t fact : {static_cast<uint32_t>(spec.scheme),
                                static_cast<uint32_t>(spec.bits), static_cast<uint32_t>(spec.norm),
                                spec.bucket, spec.k, static_cast<uint32_t>(piece.count)}) {
      hash = (hash ^ fact) * 16777619u;
    }
  }
  CodecSpec digest;
  digest.scheme = kMixedScheme;
  digest.bits = 0;
  digest.bucket = static_cast<uint32_t>(pieces.size());
  digest.k = hash;
  return digest;
}

CodecSpec kind_of(const std::vector<ReduceTensor>& tensors, const std::vector<Piece>& pieces) {
  const CodecSpec& first = tensors[pieces.front().tensor].spec;
  const bool alike = std::all_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
    return tensors[piece.tensor].spec == first;
  });
  return alike ? first : digest_of(tensors, pieces);
}

// Computes positions from sizes, when all pieces of the segment are known.
void lay_out(Segment& segment, const std::vector<ReduceTensor>& tensors) {
  size_t scales = sizeof(WireHeader), codes = 0;
  for (Piece& piece : segment.pieces) {
    const CodecSpec& spec = tensors[piece.tensor].spec;
    piece.scales_at = scales;
    piece.codes_at = codes;
    piece.codes_bytes = spec.code_bytes(piece.count);
    if (traits_of(spec.scheme).has(kVaries)) piece.slot_bytes = spec.code_bytes(spec.bucket);
    scales += spec.scales(piece.count) * sizeof(float);
    codes += piece.codes_bytes;
  }
  for (Piece& piece : segment.pieces) piece.codes_at += scales;
  segment.bytes = scales + codes;
  segment.kind = kind_of(tensors, segment.pieces);
}

}  // namespace

Chunk chunk_of(const std::vector<ReduceTensor>& tensors, int size, int owner, size_t limit) {
  Chunk chunk;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const size_t bucket = tensors[t].spec.bucket;
    const Range range = owned(tensors[t].count, bucket, tensors[t].id, size, owner);
    for (size_t at = range.begin; at < range.end;) {
      const bool full = chunk.empty() || chunk.back().count + bucket > std::max(limit, bucket);
      if (full) chunk.emplace_back();
      Segment& segment = chunk.back();
      const size_t room = (std::max(limit, bucket) - segment.count) / bucket * bucket;
      const size_t count = std::min(range.end - at, room);
      segment.pieces.push_back({t, at, count, at - range.begin, 0, 0, 0, 0});
      segment.count += count;
      at += count;
    }
  }
  for (Segment& segment : chunk) lay_out(segment, tensors);
  return chunk;
}

std::vector<Chunk> chunks_of(const std::vector<ReduceTensor>& tensors, int size, size_t limit) {
  std::vector<Chunk> chunks;
  for (int owner = 0; owner < size; ++owner) {
    chunks.push_back(chunk_of(tensors, size, owner, limit));
  }
  return chunks;
}

Messages messages_of(const Chunk& chunk) {
  Messages messages;
  for (const Segment& segment : chunk) messages.push_back(&segment);
  return messages;
}

size_t largest_message(const Messages& messages) {
  size_t largest = 0;
  for (const Segment* segment : messages) largest = std::max(largest, segment->bytes);
  return largest;
}

size_t segment_limit(const Pipelining* pipelining) {
  return pipelining != nullptr && pipelining->segment > 0 ? pipelining->segment : kUsual;
}

}  // namespace qsgd
