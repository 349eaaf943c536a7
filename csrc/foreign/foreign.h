// Operations started by a framework's runtime without Python, from descriptions that Python made
// when the program was built.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "foreign/table.h"

namespace qsgd {

// Sets the engine of foreign operations, from init to shutdown; it is owned elsewhere.
void set_current_engine(std::weak_ptr<Engine> engine);
// Throws a usage error if there is none.
std::shared_ptr<Engine> current_engine();

// An operation as text without commas, so that several can form one attribute of a graph:
// TensorFlow considers eager operations equal whose lists have texts of equal lengths. Shape and
// type are the tensor's, known when the graph runs. of_text() throws a usage error for the text of
// another version, in a saved graph.
std::string as_text(const Operation& operation);
Operation of_text(const char* text, size_t size_bytes);

// The bytes of hexadecimal digits.
std::vector<char> from_hex(const char* digits, size_t count);

// Sets whether calls of start_foreign() block this thread until their operations are done, as in
// eager execution. Ranks that wait for each other so fail; others only warn.
void set_calls_block(bool block);

// The name in qsgd_hpc.errors of the class for a kind of error.
const char* class_of(ErrorKind kind);

// One tensor of an operation.
struct ForeignTensor {
  Operation operation;
  const void* in = nullptr;
  void* out = nullptr;
};

using Handles = std::vector<std::shared_ptr<Handle>>;

// Starts the operations of one call. Operations without a name are numbered, and form one group if
// they have one. `keep` owns the tensors' memory, as in Engine::start().
// Calls `done` once, from the engine's thread or before returning: with the first error, if any,
// and the handles of all tensors, or none if the call was refused. It must neither throw nor wait
// for other operations.
void start_foreign(std::vector<ForeignTensor> tensors, const std::shared_ptr<void>& keep,
                   std::function<void(const Error* error, const Handles& handles)> done);

// The functions above, for libraries that are not linked with the core.
const QsgdTable& foreign_table();

}  // namespace qsgd
