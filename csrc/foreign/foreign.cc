#include "foreign/foreign.h"

#include <atomic>
#include <mutex>

#include "foreign/table.h"

namespace qsgd {
namespace {

// First character of an operation's text; changed whenever the fields of operations change.
constexpr char kForm = '2';

// A framework's library calls without context, and a process has one job at a time.
struct Current {
  std::mutex mutex;
  std::weak_ptr<Engine> engine;
};

Current& current() {
  static Current slot;
  return slot;
}

thread_local bool calls_block = false;

// Operations of one call, some of which are in flight.
struct Call {
  std::function<void(const Error*, const Handles&)> done;
  Handles handles;
  std::atomic<size_t> left;
};

// Reports the first error in the order of the tensors, if any.
void end(Call& call) {
  try {
    for (const auto& handle : call.handles) handle->check();
  } catch (const Error& error) {
    return call.done(&error, call.handles);
  }
  call.done(nullptr, call.handles);
}

void name(std::vector<ForeignTensor>& tensors, Engine& engine) {
  const Operation& first = tensors.front().operation;
  if (!first.name.empty()) return;
  const std::string base = engine.next_name(first.kind, first.set);
  const bool several = first.group || tensors.size() > 1;
  for (size_t i = 0; i < tensors.size(); ++i) {
    Operation& o = tensors[i].operation;
    o.name = several ? base + "." + std::to_string(i) : base;
    if (o.group) o.group->name = base;
  }
}

void submit(std::vector<ForeignTensor> tensors, const std::shared_ptr<void>& keep, Call& call) {
  const std::shared_ptr<Engine> engine = current_engine();
  name(tensors, *engine);
  std::vector<std::pair<OperationPtr, TensorMemory>> operations;
  for (ForeignTensor& t : tensors) {
    auto operation = std::make_shared<const Operation>(std::move(t.operation));
    operations.emplace_back(std::move(operation), TensorMemory{t.in, t.out, keep});
  }
  call.handles = engine->start_all(std::move(operations), /*foreign=*/true);
  if (!calls_block) return;
  const auto now = Timeline::Clock::now();
  for (const auto& handle : call.handles) handle->mark_waited_for(now);
}

}  // namespace

void set_current_engine(std::weak_ptr<Engine> engine) {
  const std::lock_guard<std::mutex> lock(current().mutex);
  current().engine = std::move(engine);
}

void set_calls_block(bool block) { calls_block = block; }

std::shared_ptr<Engine> current_engine() {
  std::shared_ptr<Engine> engine;
  {
    const std::lock_guard<std::mutex> lock(current().mutex);
    engine = current().engine.lock();
  }
  if (engine == nullptr) {
    throw usage_error("qsgd_hpc is not initialised on this rank; call hvd.init() first");
  }
  return engine;
}

std::string as_text(const Operation& operation) {
  static constexpr char kDigits[] = "0123456789abcdef";
  Writer to;
  write(operation, to);
  std::string text(1, kForm);
  for (const char byte : to.bytes()) {
    text += kDigits[static_cast<uint8_t>(byte) >> 4];
    text += kDigits[static_cast<uint8_t>(byte) & 15];
  }
  return text;
}

std::vector<char> from_hex(const char* digits, size_t count) {
  const auto value = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::vector<char> bytes;
  for (size_t i = 0; i + 1 < count; i += 2) {
    bytes.push_back(static_cast<char>(value(digits[i]) << 4 | value(digits[i + 1])));
  }
  return bytes;
}

Operation of_text(const char* text, size_t size_bytes) {
  if (size_bytes == 0 || text[0] != kForm) {
    throw usage_error(
        "a graph holds an operation of another version of qsgd-hpc; build or export it again with "
        "this one");
  }
  const std::vector<char> bytes = from_hex(text + 1, size_bytes - 1);
  Reader from(bytes.data(), bytes.size());
  return read_operation(from);
}

const char* class_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUsage:
      return "UsageError";
    case ErrorKind::kRankFailed:
      return "RankFailedError";
    case ErrorKind::kNonFinite:
      return "NonFiniteGradientError";
    default:
      return "HorovodInternalError";
  }
}

void start_foreign(std::vector<ForeignTensor> tensors, const std::shared_ptr<void>& keep,
                   std::function<void(const Error*, const Handles&)> done) {
  auto call = std::make_shared<Call>();
  call->done = std::move(done);
  try {
    submit(std::move(tensors), keep, *call);
  } catch (const Error& error) {
    // Operations that were submitted before continue, and keep their memory.
    return call->done(&error, {});
  }
  call->left = call->handles.size();
  for (size_t i = 0; i < call->handles.size(); ++i) {
    call->handles[i]->when_done([call, i] {
      call->handles[i]->release_memory();
      if (--call->left == 0) end(*call);
    });
  }
}

// The table of the functions above.
namespace {

using Owner = std::shared_ptr<const Result>;

ForeignTensor read(const QsgdTensor& from) {
  ForeignTensor t{of_text(from.operation, from.operation_bytes), from.in, from.out};
  t.operation.args.dtype = static_cast<DType>(from.dtype);
  t.operation.shape.assign(from.shape, from.shape + from.dimensions);
  t.operation.splits.assign(from.splits, from.splits + from.splits_count);
  return t;
}

QsgdResult hand_over(Owner result) {
  const Result& r = *result;
  return {new Owner(std::move(result)),
          r.output.data(),
          r.output.size(),
          r.shape.data(),
          r.shape.size(),
          r.sizes.data(),
          r.sizes.size(),
          r.value};
}

void finish(const QsgdCaller& caller, const Error* error, const Handles& handles) {
  if (error != nullptr) {
    const QsgdOutcome failed{static_cast<int>(error->kind()), error->what(), nullptr, 0};
    return caller.done(caller.context, &failed);
  }
  std::vector<QsgdResult> results;
  for (const auto& handle : handles) results.push_back(hand_over(handle->result()));
  const QsgdOutcome outcome{0, "", results.data(), results.size()};
  caller.done(caller.context, &outcome);
}

void start(const QsgdTensor* tensors, size_t count, QsgdCaller caller) {
  const std::shared_ptr<void> keep(caller.keep, caller.release);
  try {
    std::vector<ForeignTensor> read_tensors;
    for (size_t i = 0; i < count; ++i) read_tensors.push_back(read(tensors[i]));
    start_foreign(
        std::move(read_tensors), keep,
        [caller](const Error* error, const Handles& handles) { finish(caller, error, handles); });
  } catch (const Error& error) {
    finish(caller, &error, {});
  }
}

void release(void* owner) { delete static_cast<Owner*>(owner); }

}  // namespace

const QsgdTable& foreign_table() {
  static constexpr QsgdTable kTable{kQsgdTableVersion, &start, &release};
  return kTable;
}

}  // namespace qsgd
