#include "jax/program.h"

#include "foreign/foreign.h"

namespace qsgd::xla {
namespace {

std::vector<char> bytes_of(const Attributes& attributes) {
  if (attributes.count != 1 || attributes.kinds[0] != kString) {
    throw internal_error("a collective has one attribute, and it is text");
  }
  const auto& text = *static_cast<const Bytes*>(attributes.values[0]);
  return from_hex(text.data, text.size);
}

void check_job(int32_t rank, int32_t size, const Engine& engine) {
  if (rank == engine.rank() && size == engine.size()) return;
  throw usage_error("this program was compiled as rank " + std::to_string(rank) + " of " +
                    std::to_string(size) + " and is called as rank " +
                    std::to_string(engine.rank()) + " of " + std::to_string(engine.size()) +
                    "; call jax.clear_caches() after init() has formed another job");
}

Operand read_operand(Reader& from, const Buffer& in, const Buffer& out) {
  const std::string text = from.text();
  Operand operand{of_text(text.data(), text.size()), read_list(from), in, out, {}};
  Operation& operation = operand.operation;
  operation.splits = read_list(from);
  operand.conversion = conversion(in, operation);
  operation.args.dtype = operand.conversion.dtype;
  operation.shape = operand.conversion.shape;
  return operand;
}

}  // namespace

std::vector<Operand> operands_of(const CallFrame& frame, const Engine& engine) {
  const std::vector<char> bytes = bytes_of(frame.attributes);
  Reader from(bytes.data(), bytes.size());
  const auto rank = from.get<int32_t>(), size = from.get<int32_t>();
  check_job(rank, size, engine);
  const auto count = from.get<uint32_t>();
  if (frame.arguments.count != count || frame.results.count != count) {
    throw internal_error("a collective has as many results and operations as arguments");
  }
  std::vector<Operand> operands;
  for (uint32_t i = 0; i < count; ++i) {
    operands.push_back(read_operand(from, *frame.arguments.buffers[i], *frame.results.buffers[i]));
  }
  return operands;
}

bool is_made_by_engine(const Operand& operand) {
  const OpKind kind = operand.operation.kind;
  return kind != OpKind::kAllreduce && kind != OpKind::kBroadcast;
}

void check_rows(const Operand& operand, const Result& result) {
  const Operation& o = operand.operation;
  const bool told = o.kind == OpKind::kAllgather || o.kind == OpKind::kAlltoall;
  if (!told || result.sizes == operand.rows) return;
  throw usage_error("'" + o.name + "': the ranks sent " + describe(result.sizes) +
                    " rows, but the program was traced for " + describe(operand.rows) +
                    "; inside jit, pass allgather the rows of every rank (rows=) and alltoall "
                    "those it receives (received_splits=), or call it outside");
}

std::string text_of(const Error& error) {
  return std::string(class_of(error.kind())) + ": " + error.what();
}

Failure* new_failure(const Api& api, const std::string& text) {
  NewFailure made{header_of<NewFailure>(), text.c_str(), kInternal};
  return api.new_failure(&made);
}

// The runtime rejects handlers of another major version. JAX 0.5 rejects all versions but 0.1, and
// asks without functions.
bool tells_version(const CallFrame& frame) {
  Extension* const asked = frame.header.extensions;
  if (asked == nullptr || asked->type != kMetadata) return false;
  Metadata& metadata = *reinterpret_cast<MetadataRequest*>(asked)->metadata;
  const int32_t minor = frame.api == nullptr ? 1 : frame.api->version.minor;
  metadata.version = {header_of<Version>(), kMajor, minor};
  metadata.traits = 0;
  return true;
}

}  // namespace qsgd::xla
