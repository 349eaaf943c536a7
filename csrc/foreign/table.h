// The functions by which a framework's library calls the core: plain C, so that the library has no
// symbol of the core and both are built separately.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Version of the table and of its structs; a library rejects other versions.
enum { kQsgdTableVersion = 1 };

// One tensor of an operation. start() reads all of it before it returns, except `in` and `out`.
struct QsgdTensor {
  const char* operation;  // qsgd_hpc._core.Operation.text()
  size_t operation_bytes;
  uint8_t dtype;  // qsgd::DType
  const int64_t* shape;
  size_t dimensions;
  const int64_t* splits;  // of alltoall
  size_t splits_count;
  const void* in;
  void* out;  // null if the core allocates the result
};

// Result of an operation for one tensor; valid until release(owner).
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

// An error, or one result per tensor.
struct QsgdOutcome {
  int error;            // qsgd::ErrorKind; 0 for none
  const char* message;  // valid during the call
  const QsgdResult* results;
  size_t count;
};

// Callbacks of a start(): `release` is called when `in` and `out` are no longer used, or never if
// the job was lost meanwhile; `done` is called once, from any thread, and owns the results.
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
