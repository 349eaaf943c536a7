// A collective in a compiled program: what the program says of it, and answers in XLA's words.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "jax/element_type.h"
#include "jax/xla_ffi.h"

namespace qsgd::xla {

// The one attribute of a call is in hexadecimal digits what Writer writes of: rank and size of the
// job that the program was traced in (int32); the number of arguments; and of each its operation,
// as Operation.text() returns it, the rows that are to come from each rank, where the shape of the
// result depends on them, and the splits of an alltoall.
struct Operand {
  Operation operation;
  std::vector<int64_t> rows;  // from each rank, where the shape of the result depends on them
  Buffer in;
  Buffer out;
  Travelling travelling;
};

// Throws a usage error in another job than the program was traced in.
std::vector<Operand> operands_of(const CallFrame& frame, const Engine& engine);

// Whether the engine makes the result in memory of its own.
bool is_made_by_engine(const Operand& operand);
// Throws a usage error where other rows have come than the program was traced for.
void check_rows(const Operand& operand, const Result& result);

std::string text_of(const Error& error);
Failure* new_failure(const Api& api, const std::string& text);

// True where the runtime only asks for the handler's version, which is then told.
bool tells_version(const CallFrame& frame);

// Returns what work(frame) returns, or as a failure what it throws.
template <class Work>
Failure* answer(CallFrame* frame, const Work& work) {
  if (tells_version(*frame)) return nullptr;
  try {
    return work(*frame);
  } catch (const Error& error) {
    return new_failure(*frame->api, text_of(error));
  } catch (const std::exception& error) {
    return new_failure(*frame->api, text_of(internal_error(error.what())));
  }
}

}  // namespace qsgd::xla
