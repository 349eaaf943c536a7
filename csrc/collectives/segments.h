// What an owner owns of a fused list of tensors, cut into the messages of a pipeline.
//
// A message is a WireHeader, the scales of all its pieces, then their codes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/reduce.h"
#include "quant/codec.h"
#include "quant/wire.h"

namespace qsgd {

// A run of one tensor's elements, and where its scales and codes lie in the message.
struct Piece {
  size_t tensor;
  size_t begin;  // in the tensor; a multiple of the bucket
  size_t count;
  size_t place;  // of `begin` in all that the owner owns of this tensor
  size_t scales_at;
  size_t codes_at;
  size_t codes_bytes;
  size_t slot_bytes;  // of a bucket's codes where their length varies; else 0
};

struct Segment {
  std::vector<Piece> pieces;
  size_t count = 0;  // elements
  size_t bytes = 0;  // of the message in memory; see packing.h
  // What the header says: how the pieces are coded, or for pieces of several kinds a digest of it.
  CodecSpec kind = {};
};

// All that one rank owns; equal on every rank. Empty when that is nothing.
using Chunk = std::vector<Segment>;

// The chunk of `owner` among `size` owners, in segments of at most `limit` elements (but at least a
// bucket), each tensor by its own spec. Tensors are cut one by one and segments between buckets, so
// that neither fusion nor the limit changes any code.
Chunk chunk_of(const std::vector<ReduceTensor>& tensors, int size, int owner, size_t limit);

// The chunks of all owners.
std::vector<Chunk> chunks_of(const std::vector<ReduceTensor>& tensors, int size, size_t limit);

// A stream of messages, in order.
using Messages = std::vector<const Segment*>;
Messages messages_of(const Chunk& chunk);

// In memory; 0 when there is none.
size_t largest_message(const Messages& messages);

// How a compressed collective cuts its messages. The result does not depend on it.
struct Pipelining {
  size_t segment = 0;     // elements per message; 0: as many as usual
  size_t peak_bytes = 0;  // filled in: memory taken beyond the caller's
};

// Messages under way per peer and direction: one is coded while one travels and one waits.
constexpr size_t kWindow = 3;

// Elements per message.
size_t segment_limit(const Pipelining* pipelining);

}  // namespace qsgd
