// QSGD's codes made and read on a GPU: the wire format of quant/codec.h, and its bytes where the
// noise is Philox's. Everything is queued on the caller's stream; nothing waits and nothing is
// allocated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "quant/codec.h"

namespace qsgd::gpu {

using Stream = void*;  // cudaStream_t or hipStream_t
using Event = void*;   // likewise

// A run of one tensor's elements, which begins with one of its buckets: where it lies in the array
// that is coded, and where its scales and codes lie in a message, in bytes. Both are multiples
// of 4.
struct Piece {
  uint64_t at;
  uint64_t count;
  uint64_t first;   // number of its first element in the tensor, a multiple of the bucket
  uint64_t tensor;  // Philox::stirred of the tensor
  uint64_t scales_at;
  uint64_t codes_at;
  uint64_t first_bucket;  // buckets of the pieces before it
  // Error feedback, as in ReduceTensor: addresses in device memory of the float32 that belong to
  // its first element, or 0.
  uint64_t residual;
  uint64_t owner_residual;
};

// What one call codes: `list` is in device memory, so that one launch does for any number of
// tensors; null: `only` is the one piece there is.
struct Pieces {
  const Piece* list;
  uint32_t size;
  uint64_t buckets;  // of all
  Piece only;
};

// Who draws, and when. Where `later` is not null, the word behind it in device memory is added to
// the step, so that a captured graph draws anew each time it is replayed.
struct Draw {
  uint32_t step;
  uint32_t who;  // rank and phase, as in counter_high()
  const uint32_t* later;
};

// What every call takes beside: elements and their type, the code, and a flag in device memory, or
// null, that is set to 1 where something is not finite.
struct Run {
  Pieces pieces;
  DType dtype;  // float32, float64, float16 or bfloat16
  CodecSpec spec;
  uint32_t* nonfinite;
};

// The addends of an owner's sum, in rank order: rank r's message lies `stride * r` bytes behind
// that of rank 0, but rank `own` adds the array's elements, as they are. The sum is multiplied by
// `factor`.
struct Addends {
  const uint8_t* messages;
  uint64_t stride;
  int ranks;
  int own;  // -1: no rank
  float factor;
};

// A sample of how well a piece was coded: squared error and squared magnitude.
struct Judged {
  double error;
  double energy;
};

// A run of elements at one address that go to another; 0: nowhere, they are only looked at.
struct Span {
  uint64_t from;
  uint64_t to;
  uint64_t count;
  uint64_t first_block;  // blocks of kScaled elements of the spans before it
};
constexpr uint64_t kScaled = 4096;

// The list is in device memory.
struct Spans {
  const Span* list;
  uint32_t size;
  uint64_t blocks;  // of all
};

// Entry points of the library that is compiled for a GPU, which the core loads where there is one.
// Each returns null, or what went wrong.
struct Library {
  int version;
  const char* platform;  // and what it was compiled for

  // Why the kernels cannot code so, or null: they can.
  const char* (*refuse)(const CodecSpec& spec);

  // As qsgd::encode for each piece of x, with its residual added, which becomes what the code has
  // lost.
  const char* (*encode)(const void* x, const Run& run, const Draw& draw, uint8_t* message,
                        Stream stream);
  // As qsgd::decode.
  const char* (*decode)(const uint8_t* message, const Run& run, void* out, Stream stream);
  // The sum of all addends, uncoded, in float32 until it is written to `out`, whose elements lie as
  // those of x do. The flag of what is not finite is not set.
  const char* (*sum)(const Addends& addends, const void* x, const Run& run, void* out,
                     Stream stream);
  // The owner's part of a scatter-reduce in one pass: reads all addends, codes their sum, and
  // writes no sum in between. Residuals are added to x, and end as 0; those of the owner are added
  // to the sum.
  const char* (*sum_encode)(const Addends& addends, const void* x, const Run& run, const Draw& draw,
                            uint8_t* message, Stream stream);
  // Adds to sums[i], which is in device or pinned memory, how far every `every`-th bucket of piece
  // i, the first among them, is from its code. Where the piece has a residual, that is the error,
  // and x is not read.
  const char* (*judge)(const void* x, const uint8_t* message, const Run& run, uint32_t every,
                       Judged* sums, Stream stream);
  // As qsgd::scale_copy for each span, of elements of any type. Sets nonfinite[i], which is in
  // device memory and may be null, to 1 where the i-th then has NaN or Inf.
  const char* (*scale)(const Spans& spans, DType dtype, double factor, int divisor,
                       uint32_t* nonfinite, Stream stream);

  // The order of a device's work, and memory for it. All of these but `use`, `identify`,
  // `passed` and the two of pinned memory are for the calling thread's device.

  // Makes this device the calling thread's, and says which was.
  const char* (*use)(int device, int* before);
  // Writes what names the device among those of its host, kIdentity bytes at most.
  const char* (*identify)(int device, char* identity);
  // A stream that waits for no other, ahead of them where the device has priorities.
  const char* (*make_stream)(Stream* stream);
  const char* (*end_stream)(Stream stream);
  const char* (*make_event)(Event* event);
  const char* (*end_event)(Event event);
  // The event has passed once what is in the stream by now is done.
  const char* (*record)(Event event, Stream stream);
  // What is queued in the stream from now on waits for the event.
  const char* (*wait)(Stream stream, Event event);
  // Whether it has, without waiting.
  const char* (*passed)(Event event, bool* passed);
  const char* (*copy)(void* to, const void* from, size_t size_bytes, Stream stream);
  const char* (*clear)(void* to, size_t size_bytes, Stream stream);
  // The host's memory that kernels of all devices read and write, and copies take at full speed.
  const char* (*take_pinned)(size_t size_bytes, void** memory);
  const char* (*give_pinned)(void* memory);
  // The device's, in the order of the stream.
  const char* (*take)(size_t size_bytes, void** memory, Stream stream);
  const char* (*give)(void* memory, Stream stream);
};

constexpr size_t kIdentity = 32;
constexpr int kLibraryVersion = 3;
constexpr const char* kLibrarySymbol = "qsgd_gpu_library";

}  // namespace qsgd::gpu
