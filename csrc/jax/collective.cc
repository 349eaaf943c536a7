#include "jax/collective.h"

#include <cstring>

#include "foreign/foreign.h"
#include "jax/element_type.h"
#include "jax/finishers.h"

namespace qsgd::xla {
namespace {

struct Operand {
  Operation operation;
  std::vector<int64_t> rows;  // from each rank, where the shape of the result depends on them
  Buffer in;
  Buffer out;
  Travelling travelling;
  std::vector<int64_t> widened;
};

// What the program was compiled with.
struct Traced {
  int32_t rank;
  int32_t size;
  std::vector<Operand> operands;  // without their buffers
};

int digit(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

Traced traced(const Attributes& attributes) {
  if (attributes.count != 1 || attributes.kinds[0] != kString) {
    throw internal_error("a collective has one attribute, and it is text");
  }
  const auto& text = *static_cast<const Bytes*>(attributes.values[0]);
  std::vector<char> bytes(text.size / 2);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(digit(text.data[2 * i]) * 16 + digit(text.data[2 * i + 1]));
  }
  Reader from(bytes.data(), bytes.size());
  Traced t{from.get<int32_t>(), from.get<int32_t>(), {}};
  t.operands.resize(from.get<uint32_t>());
  for (Operand& operand : t.operands) {
    const std::string text = from.text();
    operand.operation = of_text(text.data(), text.size());
    operand.rows = read_list(from);
    operand.operation.splits = read_list(from);
  }
  return t;
}

void check_job(const Traced& program, const Engine& engine) {
  if (program.rank == engine.rank() && program.size == engine.size()) return;
  throw usage_error("this program was compiled as rank " + std::to_string(program.rank) + " of " +
                    std::to_string(program.size) + " and is called as rank " +
                    std::to_string(engine.rank()) + " of " + std::to_string(engine.size()) +
                    "; call jax.clear_caches() after init() has formed another job");
}

// As qsgd_hpc.errors names them; qsgd_hpc.jax raises them by these names.
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

std::string text_of(const Error& error) {
  return std::string(class_of(error.kind())) + ": " + error.what();
}

Failure* new_failure(const Api& api, const std::string& text) {
  NewFailure made{header_of<NewFailure>(), text.c_str(), kInternal};
  return api.new_failure(&made);
}

// What comes back of an operation whose result the core has made.
void copy_out(const Operand& operand, const Result& result) {
  const Operation& o = operand.operation;
  const bool told = o.kind == OpKind::kAllgather || o.kind == OpKind::kAlltoall;
  if (told && result.sizes != operand.rows) {
    throw usage_error("'" + o.name + "': the ranks sent " + describe(result.sizes) +
                      " rows, but the program was traced for " + describe(operand.rows) +
                      "; inside jit, tell allgather the rows of every rank (rows=) and alltoall "
                      "those it receives (received_splits=), or call it outside");
  }
  const size_t bytes = result.output.size();
  if (operand.travelling.widened) {
    const auto* const wide = reinterpret_cast<const int64_t*>(result.output.data());
    return narrow(operand.in.type, wide, bytes / sizeof(int64_t), operand.out.data);
  }
  if (bytes > 0) std::memcpy(operand.out.data, result.output.data(), bytes);
}

// One call under way. It ends when the engine has let go of its memory, or with the job.
class Call {
 public:
  Call(const CallFrame& frame, Traced program);
  ~Call() { end(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  std::vector<ForeignTensor> tensors(int rank);
  // From now on the call ends by this future alone.
  Future* promise();
  void note(const Error* error, const Handles& handles);

 private:
  // What is left to do, on a thread on which the program may go on.
  struct Ending {
    const Api* api;
    std::vector<Operand> operands;
    Handles handles;
    std::string failure;

    void deliver();
    void operator()(Future* future);
  };

  void end();

  Future* future_ = nullptr;
  std::shared_ptr<Ending> ending_;
};

Call::Call(const CallFrame& frame, Traced program) : ending_(std::make_shared<Ending>()) {
  ending_->api = frame.api;
  ending_->operands = std::move(program.operands);
  const auto count = static_cast<int64_t>(ending_->operands.size());
  if (frame.arguments.count != count || frame.results.count != count) {
    throw internal_error("a collective has as many results and operations as arguments");
  }
  for (size_t i = 0; i < ending_->operands.size(); ++i) {
    Operand& operand = ending_->operands[i];
    operand.in = *frame.arguments.buffers[i];
    operand.out = *frame.results.buffers[i];
    operand.travelling = travelling(operand.in, operand.operation);
  }
}

Future* Call::promise() {
  OfFuture made{header_of<OfFuture>(), nullptr};
  if (ending_->api->new_future(&made) != nullptr) throw internal_error("XLA gave no future");
  return future_ = made.future;
}

std::vector<ForeignTensor> Call::tensors(int rank) {
  std::vector<ForeignTensor> all;
  for (Operand& operand : ending_->operands) {
    ForeignTensor t{operand.operation, operand.in.data, operand.out.data};
    Operation& o = t.operation;
    o.args.dtype = operand.travelling.dtype;
    o.shape = operand.travelling.shape;
    if (o.kind == OpKind::kBroadcast && o.root == rank && t.in != t.out) {
      std::memcpy(t.out, t.in, o.size_bytes());  // the engine works on `out` alone
    }
    if (operand.travelling.widened) {
      operand.widened.resize(o.count());
      widen(operand.in.type, operand.in.data, o.count(), operand.widened.data());
      t.in = t.out = operand.widened.data();
    }
    all.push_back(std::move(t));
  }
  return all;
}

void Call::note(const Error* error, const Handles& handles) {
  if (error == nullptr) {
    ending_->handles = handles;
    return;
  }
  ending_->failure = text_of(*error);
  // The engine never lets go of what another rank might still write to.
  if (error->kind() == ErrorKind::kRankFailed) end();
}

void Call::end() {
  Future* const future = std::exchange(future_, nullptr);
  if (future == nullptr) return;
  Finishers::of_process().run([ending = ending_, future] { (*ending)(future); });
}

void Call::Ending::deliver() {
  for (size_t i = 0; i < handles.size(); ++i) {
    Operand& operand = operands[i];
    const OpKind kind = operand.operation.kind;
    if (kind != OpKind::kAllreduce && kind != OpKind::kBroadcast) {
      copy_out(operand, *handles[i]->result());
    } else if (operand.travelling.widened) {
      narrow(operand.in.type, operand.widened.data(), operand.widened.size(), operand.out.data);
    }
  }
}

void Call::Ending::operator()(Future* future) {
  try {
    if (failure.empty()) deliver();
  } catch (const Error& error) {
    failure = text_of(error);
  }
  handles.clear();
  if (failure.empty()) {
    OfFuture done{header_of<OfFuture>(), future};
    api->complete_future(&done);
    return;
  }
  FailFuture failed{header_of<FailFuture>(), future, new_failure(*api, failure)};
  api->fail_future(&failed);
}

void start(CallFrame& frame) {
  Traced program = traced(frame.attributes);
  check_job(program, *current_engine());
  const auto call = std::make_shared<Call>(frame, std::move(program));
  std::vector<ForeignTensor> tensors = call->tensors(current_engine()->rank());
  frame.future = call->promise();
  start_foreign(std::move(tensors), call,
                [call](const Error* error, const Handles& handles) { call->note(error, handles); });
}

// The runtime refuses a handler of another major version, and says so.
void tell_version(const Api& api, Metadata& metadata) {
  metadata.version = {header_of<Version>(), kMajor, api.version.minor};
  metadata.traits = 0;
}

}  // namespace

Failure* collective(CallFrame* frame) {
  Extension* const asked = frame->header.extensions;
  if (asked != nullptr && asked->type == kMetadata) {
    tell_version(*frame->api, *reinterpret_cast<MetadataRequest*>(asked)->metadata);
    return nullptr;
  }
  try {
    start(*frame);
  } catch (const Error& error) {
    return new_failure(*frame->api, text_of(error));
  } catch (const std::exception& error) {
    return new_failure(*frame->api, text_of(internal_error(error.what())));
  }
  return nullptr;
}

}  // namespace qsgd::xla
