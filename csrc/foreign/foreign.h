// Operations that a framework's own runtime starts, without Python: what they are crossed from
// there when the program was built.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "foreign/table.h"

namespace qsgd {

// The engine that foreign operations go to, from init to shutdown; it is held by others.
void set_current_engine(std::weak_ptr<Engine> engine);
// Throws a usage error where there is none.
std::shared_ptr<Engine> current_engine();

// An operation as text without commas, so that several can be one attribute of a graph: TensorFlow
// takes eager operations whose lists have texts of equal lengths for the same. Shape and type are
// the tensor's, which are known when the graph runs. of_text() throws a usage error for what a
// saved graph has of another version.
std::string as_text(const Operation& operation);
Operation of_text(const char* text, size_t size_bytes);

// One tensor of an operation.
struct ForeignTensor {
  Operation operation;
  const void* in = nullptr;
  void* out = nullptr;
};

using Handles = std::vector<std::shared_ptr<Handle>>;

// Starts the operations of one call. Those without a name are numbered, and form one group where
// they say that they are in one. `keep` owns the tensors' memory, as in Engine::submit.
// Calls `done` once, from the engine's thread or before it returns: with an error's text, or with
// the handles of all tensors. It must not throw, nor wait for other operations.
void start_foreign(std::vector<ForeignTensor> tensors, const std::shared_ptr<void>& keep,
                   std::function<void(const Error* error, const Handles& handles)> done);

// The functions above, for libraries that are linked with nothing of the core.
const QsgdTable& foreign_table();

}  // namespace qsgd
