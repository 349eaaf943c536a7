#include "collectives/segments.h"

#include <algorithm>

#include "collectives/schedule.h"

namespace qsgd {
namespace {

constexpr size_t kLeast = size_t{1} << 14;  // below, a message's own cost exceeds what it hides
constexpr size_t kMost = size_t{1} << 18;   // float32 of a segment stays within the caches
constexpr size_t kPerChunk = 8;  // enough to hide coding, and to keep all windows below 1.5 chunks

// Turns sizes into places, now that all pieces of the segment are known.
void lay_out(Segment& segment, const CodecSpec& spec) {
  size_t scales = sizeof(WireHeader), codes = 0;
  for (Piece& piece : segment.pieces) {
    piece.scales_at = scales;
    piece.codes_at = codes;
    scales += spec.scales(piece.count) * sizeof(float);
    codes += spec.code_bytes(piece.count);
  }
  for (Piece& piece : segment.pieces) piece.codes_at += scales;
  segment.bytes = scales + codes;
}

}  // namespace

Chunk chunk_of(const std::vector<ReduceTensor>& tensors, const CodecSpec& spec, int size, int owner,
               size_t limit) {
  limit = std::max<size_t>(limit / spec.bucket, 1) * spec.bucket;
  Chunk chunk;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const Range range = owned(tensors[t].count, spec.bucket, tensors[t].id, size, owner);
    for (size_t at = range.begin; at < range.end;) {
      if (chunk.empty() || limit - chunk.back().count < spec.bucket) chunk.emplace_back();
      Segment& segment = chunk.back();
      const size_t room = (limit - segment.count) / spec.bucket * spec.bucket;
      const size_t count = std::min(range.end - at, room);
      segment.pieces.push_back({t, at, count, at - range.begin, 0, 0});
      segment.count += count;
      at += count;
    }
  }
  for (Segment& segment : chunk) lay_out(segment, spec);
  return chunk;
}

std::vector<Chunk> chunks_of(const std::vector<ReduceTensor>& tensors, const CodecSpec& spec,
                             int size, size_t limit) {
  std::vector<Chunk> chunks;
  for (int owner = 0; owner < size; ++owner) {
    chunks.push_back(chunk_of(tensors, spec, size, owner, limit));
  }
  return chunks;
}

std::vector<size_t> message_sizes(const Chunk& chunk) {
  std::vector<size_t> sizes;
  for (const Segment& segment : chunk) sizes.push_back(segment.bytes);
  return sizes;
}

size_t largest_message(const Chunk& chunk) {
  size_t largest = 0;
  for (const Segment& segment : chunk) largest = std::max(largest, segment.bytes);
  return largest;
}

size_t segment_limit(const std::vector<ReduceTensor>& tensors, const CodecSpec& spec, int owners,
                     const Pipelining* pipelining) {
  if (pipelining != nullptr && pipelining->segment > 0) return pipelining->segment;
  size_t total = 0;
  for (const ReduceTensor& tensor : tensors) total += tensor.count;
  const size_t even = total / (static_cast<size_t>(owners) * kPerChunk);
  return std::max<size_t>(std::clamp(even, kLeast, kMost), spec.bucket);
}

}  // namespace qsgd
