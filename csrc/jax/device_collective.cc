#include <chrono>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <vector>

#include "common/kept.h"
#include "foreign/foreign.h"
#include "jax/collective.h"
#include "jax/program.h"

namespace qsgd::xla {
namespace {

constexpr std::chrono::milliseconds kLook{100};

// The program's stream on its device, and copies on it.
class Queue {
 public:
  Queue(Engine& engine, int device, gpu::Stream stream)
      : stream_(stream), device_(engine.mark(device, stream)->device()) {}

  void copy(void* to, const void* from, size_t size_bytes) {
    if (size_bytes == 0) return;
    const gpu::Device::Use here(device_);
    device_.require(device_.library().copy(to, from, size_bytes, stream_));
  }
  std::shared_ptr<gpu::Mark> mark() { return device_.mark(stream_); }
  void wait() { device_.await(*mark()); }

 private:
  const gpu::Stream stream_;
  gpu::Device& device_;
};

std::shared_ptr<Handle> start(Engine& engine, const Operand& operand,
                              const std::shared_ptr<gpu::Mark>& ready) {
  if (operand.conversion.widening != nullptr) {
    throw internal_error("'" + operand.operation.name + "' is not widened by its program");
  }
  // A broadcast uses `out` only, and results allocated by the engine are copied later.
  void* const out = is_made_by_engine(operand) ? nullptr : operand.out.data;
  const bool in_place = operand.operation.kind == OpKind::kBroadcast;
  return engine.start(std::make_shared<const Operation>(operand.operation),
                      {in_place ? out : operand.in.data, out, nullptr, ready});
}

// The engine counts these as waits: ranks whose programs differ in order, and which thus wait for
// each other, get an error.
void wait_for(const Handles& handles) {
  std::deque<Waiting> waiting;
  for (const auto& handle : handles) waiting.emplace_back(*handle);
  for (const auto& handle : handles) {
    while (!handle->wait_for(kLook)) {
    }
  }
}

Handles reduced(Engine& engine, const std::vector<Operand>& operands,
                const std::shared_ptr<gpu::Mark>& ready) {
  Handles handles;
  std::exception_ptr refused;
  try {
    for (const Operand& operand : operands) handles.push_back(start(engine, operand, ready));
  } catch (const Error&) {
    refused = std::current_exception();
  }
  wait_for(handles);  // also if one was refused: the others still use XLA's buffers
  if (refused) std::rethrow_exception(refused);
  for (const auto& handle : handles) handle->check();
  return handles;
}

void carry_out(const CallFrame& frame, int device, gpu::Stream stream) {
  const std::shared_ptr<Engine> engine = current_engine();
  const std::vector<Operand> operands = operands_of(frame, *engine);
  Queue queue(*engine, device, stream);
  for (const Operand& operand : operands) {
    const Operation& o = operand.operation;
    const bool is_root = o.kind == OpKind::kBroadcast && o.root == engine->rank();
    if (!is_root || operand.in.data == operand.out.data) continue;
    queue.copy(operand.out.data, operand.in.data, o.size_bytes());
  }
  // If the job ends, copies of the results may be in flight.
  const KeptOnFailure<Handles> handles{reduced(*engine, operands, queue.mark())};
  bool copies = false;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (!is_made_by_engine(operands[i])) continue;
    const std::shared_ptr<const Result> result = (*handles)[i]->result();
    check_rows(operands[i], *result);
    queue.copy(operands[i].out.data, result->data(), result->size_bytes());
    copies = true;
  }
  if (copies) queue.wait();  // before the results are released
}

}  // namespace

Failure* device_collective(CallFrame* frame) {
  return answer(frame, [](const CallFrame& call) -> Failure* {
    if (call.api->header.size_bytes < offsetof(Api, get_device) + sizeof(Api::get_device)) {
      throw usage_error(
          "this jaxlib does not pass a collective its device; install 0.6 or newer, or call hvd "
          "outside jax.jit");
    }
    OfDevice device{header_of<OfDevice>(), call.context, 0};
    if (Failure* const failure = call.api->get_device(&device)) return failure;
    OfStream stream{header_of<OfStream>(), call.context, nullptr};
    if (Failure* const failure = call.api->get_stream(&stream)) return failure;
    carry_out(call, device.number, stream.stream);
    return nullptr;
  });
}

Failure* twin_collective(CallFrame* frame) {
  return answer(frame, [](const CallFrame& call) -> Failure* {
    carry_out(call, 0, nullptr);
    return nullptr;
  });
}

}  // namespace qsgd::xla
