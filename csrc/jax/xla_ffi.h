// The part of XLA's foreign-function interface that this package uses, declared here so that one
// binary serves every jaxlib: the layouts are fixed within major version 0, and each struct
// contains its size. Names are this package's; the order and the types are XLA's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsgd::xla {

struct Failure;  // owned by the runtime, like Future
struct Future;
struct Extension {
  size_t size_bytes;
  int32_t type;
  Extension* next;
};

// With this extension, the runtime asks a handler for its version instead of calling it.
constexpr int32_t kMetadata = 1;

// Every struct of the interface begins with this header.
struct Header {
  size_t size_bytes;
  Extension* extensions;
};

struct Version {
  Header header;
  int32_t major;
  int32_t minor;
};

struct Metadata {
  size_t size_bytes;
  Version version;
  uint32_t traits;
};

struct MetadataRequest {
  Extension extension;
  Metadata* metadata;
};

struct Bytes {
  const char* data;
  size_t size;
};

struct Buffer {
  Header header;
  int32_t type;  // see element_type.h
  void* data;
  int64_t dimensions;
  int64_t* extents;
};

// Arguments or results.
struct Buffers {
  Header header;
  int64_t count;
  int32_t* kinds;  // all are kBuffer
  Buffer** buffers;
};
constexpr int32_t kBuffer = 1;

struct Attributes {
  Header header;
  int64_t count;
  int32_t* kinds;
  Bytes** names;
  void** values;
};
constexpr int32_t kString = 4;  // the value is a Bytes

struct NewFailure {
  Header header;
  const char* message;
  int32_t code;
};
constexpr int32_t kInternal = 13;

struct OfFuture {
  Header header;
  Future* future;
};

struct FailFuture {
  Header header;
  Future* future;
  Failure* failure;  // ownership is passed
};

struct OfStream {
  Header header;
  void* context;
  void* stream;  // set by the runtime: CUDA's or HIP's
};

struct OfDevice {
  Header header;
  void* context;
  int32_t number;  // set by the runtime
};

// Functions that return a failure return null for success.
struct Api {
  Header header;
  Version version;
  const void* internal;
  Failure* (*new_failure)(NewFailure*);
  void (*unused[3])();
  Failure* (*get_stream)(OfStream*);
  void (*unused_either[8])();
  Failure* (*new_future)(OfFuture*);
  Failure* (*complete_future)(OfFuture*);
  Failure* (*fail_future)(FailFuture*);
  void (*get_run)();
  Failure* (*get_device)(OfDevice*);  // added in a later minor version than the others
};

struct CallFrame {
  Header header;
  const Api* api;
  void* context;
  int32_t stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
  Future* future;  // set by the handler: the call ends when it is completed
};

constexpr int32_t kMajor = 0;

template <class T>
Header header_of() {
  return {sizeof(T), nullptr};
}

}  // namespace qsgd::xla
