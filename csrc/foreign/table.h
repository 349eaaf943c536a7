// The functions by which a framework's library reaches the core: plain C, so that the library holds
// no symbol of the core and each may be built by itself.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Of the table and all that it takes; a library refuses any other.
enum { kQsgdTableVersion = 1 };

// One tensor of an operation. Everything is read before start() returns, but for `in` and `out`.
struct QsgdTensor {
  const char* operation;  // qsgd_hpc._core.Operation.text()
  size_t operation_bytes;
  uint8_t dtype;  // qsgd::DType
  const int64_t* shape;
  size_t dimensions;
  const int64_t* splits;  // of alltoall
  size_t splits_count;
  const void* in;
  void* out;  // null where the core makes the result
};

// What an operation hands back of one tensor; valid until release(owner).
struct QsgdResult {
  void* owner;
  const void* data;
  size_t size_bytes;
  const int64_t* shape;
  size_t dimensions;
  const int64_t* sizes;  // rows from each rank
  size_t sizes_count;
  int64_t value;
};

// Either an error or as many results as there were tensors.
struct QsgdOutcome {
  int error;            // qsgd::ErrorKind; 0 for none
  const char* message;  // valid during the call
  const QsgdResult* results;
  size_t count;
};

// What the core owes a call of start(): `release` once it has done with `in` and `out`, or never if
// the job was lost meanwhile; and `done` once, from any thread, which owns the results then.
struct QsgdCaller {
  void* keep;
  void (*release)(void* keep);
  void* context;
  void (*done)(void* context, const QsgdOutcome* outcome);
};

struct QsgdTable {
  uint32_t version;
  void (*start)(const QsgdTensor* tensors, size_t count, QsgdCaller caller);
  void (*release)(void* owner);
};

}  // extern "C"
