// Encoding and decoding of QSGD's codes on a GPU, in the wire format of quant/codec.h; with Philox
// noise, the bytes are the same. All work is queued on the caller's stream; nothing blocks or
// allocates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "quant/codec.h"

namespace qsgd::gpu {

using Stream = void*;  // cudaStream_t or hipStream_t
using Event = void*;   // cudaEvent_t or hipEvent_t

// Consecutive elements of one tensor, beginning with a bucket: positions in the coded array, and of
// its scales and codes in a message, in bytes. Both byte positions are multiples of 4.
struct Piece {
  uint64_t at;
  uint64_t count;
  uint64_t first;   // number of its first element in the tensor, a multiple of the bucket
  uint64_t tensor;  // Philox::mix() of seed and tensor
  uint64_t scales_at;
  uint64_t codes_at;
  uint64_t first_bucket;  // number of buckets of the pieces before it
  // Error feedback, as in ReduceTensor: device addresses of the float32 residuals of its first
  // element, or 0.
  uint64_t residual;
  uint64_t owner_residual;
};

// The pieces of one call. `list` is in device memory, so that one launch handles any number of
// tensors; null: `only` is the single piece.
struct Pieces {
  const Piece* list;
  uint32_t size;
  uint64_t buckets;  // of all pieces
  Piece only;
};

// Key of the noise. If `later` is not null, the word at that device address is added to the step,
// so that each replay of a captured graph draws different noise.
struct Draw {
  uint32_t step;
  uint32_t who;  // rank and phase, as in counter_high()
  const uint32_t* later;
};

// Further arguments of every call: pieces, element type, code, and a flag in device memory, or
// null, that is set to 1 if a value is not finite.
struct Run {
  Pieces pieces;
  DType dtype;  // float32, float64, float16 or bfloat16
  CodecSpec spec;
  uint32_t* nonfinite;
};

// The addends of an owner's sum, in rank order: rank r's message begins `stride * r` bytes after
// rank 0's, but rank `own` adds the array's elements uncoded. The sum is multiplied by `factor`.
struct Addends {
  const uint8_t* messages;
  uint64_t stride;
  int ranks;
  int own;  // -1: no rank
  float factor;
};

// Sampled coding error of a piece: squared error and squared magnitude.
struct Judged {
  double error;
  double energy;
};

// Consecutive elements copied from one address to another; 0: only checked, not copied.
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
  uint64_t blocks;  // of all spans
};

// Entry points of the library of GPU kernels, which the core loads if it exists. Each returns null,
// or the error.
struct Library {
  int version;
  const char* platform;  // with the GPUs it was compiled for

  // Why the kernels do not support the code, or null if they do.
  const char* (*refuse)(const CodecSpec& spec);

  // As qsgd::encode for each piece of x plus its residual, which becomes the coding error.
  const char* (*encode)(const void* x, const Run& run, const Draw& draw, uint8_t* message,
                        Stream stream);
  // As qsgd::decode.
  const char* (*decode)(const uint8_t* message, const Run& run, void* out, Stream stream);
  // Writes the decoded sum of all addends to `out`, which has the layout of x; sums are float32.
  // Does not set the flag for non-finite values.
  const char* (*sum)(const Addends& addends, const void* x, const Run& run, void* out,
                     Stream stream);
  // The owner's part of a scatter-reduce in one pass: reads all addends and codes their sum,
  // without writing it. Residuals are added to x and set to 0; the owner's are added to the sum.
  const char* (*sum_encode)(const Addends& addends, const void* x, const Run& run, const Draw& draw,
                            uint8_t* message, Stream stream);
  // Adds to sums[i], in device or pinned memory, the coding error of every `every`-th bucket of
  // piece i, beginning with the first. If the piece has a residual, that is the error, and x is not
  // read.
  const char* (*judge)(const void* x, const uint8_t* message, const Run& run, uint32_t every,
                       Judged* sums, Stream stream);
  // As qsgd::scale_copy for each span, for any element type. Sets nonfinite[i], in device memory or
  // null, to 1 if the i-th result contains NaN or Inf.
  const char* (*scale)(const Spans& spans, DType dtype, double factor, int divisor,
                       uint32_t* nonfinite, Stream stream);

  // Streams, events and memory. All except `use`, `identify`, `passed` and the functions for pinned
  // memory apply to the calling thread's current device.

  // Makes the device current for the calling thread, and returns the previous one.
  const char* (*use)(int device, int* before);
  // Writes an identifier of the device, unique on its host, of at most kIdentity bytes.
  const char* (*identify)(int device, char* identity);
  // Creates a non-blocking stream, with high priority if the device has priorities.
  const char* (*make_stream)(Stream* stream);
  const char* (*end_stream)(Stream stream);
  const char* (*make_event)(Event* event);
  const char* (*end_event)(Event event);
  // The event passes when all work now in the stream is done.
  const char* (*record)(Event event, Stream stream);
  // Work queued in the stream from now on waits for the event.
  const char* (*wait)(Stream stream, Event event);
  // Whether the event has passed; does not block.
  const char* (*passed)(Event event, bool* passed);
  const char* (*copy)(void* to, const void* from, size_t size_bytes, Stream stream);
  const char* (*clear)(void* to, size_t size_bytes, Stream stream);
  // Pinned host memory, accessible to kernels of all devices and copied at full speed.
  const char* (*take_pinned)(size_t size_bytes, void** memory);
  const char* (*give_pinned)(void* memory);
  // Device memory, allocated and freed in stream order.
  const char* (*take)(size_t size_bytes, void** memory, Stream stream);
  const char* (*give)(void* memory, Stream stream);
};

constexpr size_t kIdentity = 32;
constexpr int kLibraryVersion = 3;
constexpr const char* kLibrarySymbol = "qsgd_gpu_library";

}  // namespace qsgd::gpu
