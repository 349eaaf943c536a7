// A collective in a compiled program: its description, and the answer to XLA.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "jax/element_type.h"
#include "jax/xla_ffi.h"

namespace qsgd::xla {

// The only attribute of a call contains, in hexadecimal digits, values written by Writer: rank and
// size of the job for which the program was traced (int32); the number of arguments; and for each
// its operation, as returned by Operation.text(), the expected rows from each rank if the result's
// shape depends on them, and the splits of an alltoall.
struct Operand {
  Operation operation;
  std::vector<int64_t> rows;  // from each rank, if the result's shape depends on them
  Buffer in;
  Buffer out;
  Conversion conversion;
};

// Throws a usage error if the program was traced for another job.
std::vector<Operand> operands_of(const CallFrame& frame, const Engine& engine);

// Whether the engine allocates the result.
bool is_made_by_engine(const Operand& operand);
// Throws a usage error if the rows differ from those for which the program was traced.
void check_rows(const Operand& operand, const Result& result);

// The error's class, by whose name qsgd_hpc.jax raises it, and its message.
std::string text_of(const Error& error);
Failure* new_failure(const Api& api, const std::string& text);

// Returns true if the runtime only asks for the handler's version, after writing it.
bool tells_version(const CallFrame& frame);

// Returns the result of work(frame), or its exception as a failure.
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
