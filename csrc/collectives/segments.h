// The elements of a fused list of tensors that an owner owns, divided into the messages of a
// pipeline.
//
// A message consists of a WireHeader, the scales of all its pieces, and their codes.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/reduce.h"
#include "quant/codec.h"
#include "quant/wire.h"

namespace qsgd {

// Consecutive elements of one tensor, and the positions of their scales and codes in the message.
struct Piece {
  size_t tensor;
  size_t begin;  // in the tensor; a multiple of the bucket
  size_t count;
  size_t place;  // of `begin` among the elements of this tensor that the owner owns
  size_t scales_at;
  size_t codes_at;
  size_t codes_bytes;
  size_t slot_bytes;  // of a bucket's codes if their length varies; else 0
};

struct Segment {
  std::vector<Piece> pieces;
  size_t count = 0;  // elements
  size_t bytes = 0;  // of the message in memory; see windows.cc
  // Header entry: the code of the pieces, or a digest if their codes differ.
  CodecSpec kind = {};
};

// All elements of one owner; equal on every rank. May be empty.
using Chunk = std::vector<Segment>;

// The chunk of `owner` among `size` owners, in segments of at most `limit` elements (but at least a
// bucket), each tensor with its own spec. Tensors are partitioned separately and segments cut
// between buckets, so that neither fusion nor the limit changes any code.
Chunk chunk_of(const std::vector<ReduceTensor>& tensors, int size, int owner, size_t limit);

// The chunks of all owners.
std::vector<Chunk> chunks_of(const std::vector<ReduceTensor>& tensors, int size, size_t limit);

// A sequence of messages.
using Messages = std::vector<const Segment*>;
Messages messages_of(const Chunk& chunk);

// Size in memory; 0 if there is none.
size_t largest_message(const Messages& messages);

// Message length of a compressed collective. The result does not depend on it.
struct Pipelining {
  size_t segment = 0;     // elements per message; 0: the default
  size_t peak_bytes = 0;  // output: bytes allocated besides the caller's
};

// Elements per message.
size_t segment_limit(const Pipelining* pipelining);

}  // namespace qsgd
