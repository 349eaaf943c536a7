// Description of an operation on one tensor, equal on all ranks. Immutable once submitted, so that
// it can be shared.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "collectives/reduce.h"
#include "common/bytes.h"
#include "quant/codec.h"

namespace qsgd {

using Key = std::pair<int32_t, std::string>;  // of an operation: process set and name

struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<std::string>()(key.second) + static_cast<size_t>(key.first);
  }
};
template <class Value>
using KeyMap = std::unordered_map<Key, Value, KeyHash>;

using Numbers = std::vector<int64_t>;

enum class OpKind : uint8_t {
  kAllreduce,
  kBroadcast,
  kAllgather,
  kAlltoall,
  kReducescatter,
  kBarrier,
  kJoin,
  kAddSet,
  kRemoveSet,
};
constexpr int kOpKinds = 9;
const char* describe(OpKind kind);
// Whether it treats the first dimension differently from the others.
bool has_rows(OpKind kind);
bool reduces(OpKind kind);
// Whether it changes which ranks take part in later operations, so that all ranks must get it.
bool changes_ranks(OpKind kind);

constexpr size_t kMaxName = 1024;  // bytes

// What the planner may choose instead of the requested code.
enum class Choice : uint8_t {
  kNothing,
  kBits,  // 8 or fewer bits, or float32
  kCode,  // and codes that lose less with as many bits
};

// The requested compression of a tensor.
struct Coding {
  CodecSpec spec;
  Choice choice = Choice::kNothing;
  bool error_feedback = false;
  double nmse_budget = 0;  // 0: none; else a code that exceeds it gets more bits

  bool operator==(const Coding& o) const {
    return spec == o.spec && choice == o.choice && error_feedback == o.error_feedback &&
           nmse_budget == o.nmse_budget;
  }
};

// Operations of one group start and complete together.
struct Group {
  std::string name;
  uint32_t size = 0;

  bool operator==(const Group& o) const { return size == o.size && name == o.name; }
};

struct Operation {
  OpKind kind = OpKind::kAllreduce;
  std::string name;  // unique within the process set; empty: the engine chooses one
  int32_t set = 0;   // process set; 0: all ranks
  Numbers shape;
  ReduceArgs args;  // dtype for every kind; the rest for reductions
  int32_t root = 0;
  Numbers splits;  // of alltoall: rows for each rank; empty: equally many
  Numbers ranks;   // of a process set to add, ascending; or the number of one to remove
  std::optional<Group> group;
  std::optional<Coding> coding;  // none: not compressed
  bool lasting = false;          // the name is used in every step, so state is stored for it
  bool check_finite = false;     // NaN or Inf in the result is reported
  bool on_device = false;        // the tensor is in device memory; set by the engine

  Key key() const { return {set, name}; }
  size_t count() const;
  size_t size_bytes() const { return count() * facts(args.dtype).size; }
  // Length of the first dimension.
  int64_t rows() const { return shape.front(); }
  size_t row_count() const;  // elements
  size_t row_bytes() const { return row_count() * facts(args.dtype).size; }
};
bool operator==(const Operation& a, const Operation& b);

using OperationPtr = std::shared_ptr<const Operation>;

// Whether the ranks' values of a field must be equal.
enum class Compared : uint8_t {
  kNever,
  kAlways,
  kButRows,       // all but the first number, which each rank may choose
  kOfReductions,  // for reductions only
};

// Properties of a field.
struct Field {
  const char* name;  // in Python
  Compared compared = Compared::kNever;
  const char* what = "";    // what the ranks differ in, for the error
  const char* remedy = "";  // how to fix it
  bool fuses = true;        // tensors that differ in it may share a message
  bool is_sent = true;      // is sent to rank 0
};

// Calls visit(Field, get) for each field of an operation; get(operation) is the value. The
// constructor for Python, messages, comparisons and error texts are generated from this list, in
// its order.
template <class Visit>
void visit_fields(const Visit& visit) {
#define QSGD_VALUE(member) [](auto& operation) -> auto& { return operation.member; }
  using C = Compared;
  constexpr bool kNotFused = false;
  visit(Field{"kind", C::kAlways, "operation",
              "Every rank must call the same operation under one name.", kNotFused},
        QSGD_VALUE(kind));
  visit(Field{"name"}, QSGD_VALUE(name));
  visit(Field{"process_set", C::kNever, "", "", kNotFused}, QSGD_VALUE(set));
  visit(Field{"dtype", C::kAlways, "element type",
              "Every rank must submit the same type; cast the tensor before the call.", kNotFused},
        QSGD_VALUE(args.dtype));
  visit(Field{"shape", C::kButRows, "shape",
              "Every rank must submit equal shapes; check that the model is built identically on "
              "every rank."},
        QSGD_VALUE(shape));
  visit(Field{"root", C::kAlways, "root rank", "Every rank must name the same root.", kNotFused},
        QSGD_VALUE(root));
  visit(Field{"splits", C::kNever, "", "", kNotFused, /*is_sent=*/false}, QSGD_VALUE(splits));
  visit(Field{"ranks", C::kAlways, "process set",
              "All ranks of the job must add and remove the same process sets in the same order.",
              kNotFused},
        QSGD_VALUE(ranks));
  visit(Field{"group", C::kAlways, "group", "Every rank must submit a group of the same tensors."},
        QSGD_VALUE(group));
  visit(Field{"op", C::kOfReductions, "reduction", "Every rank must pass the same op.", kNotFused},
        QSGD_VALUE(args.op));
  visit(Field{"prescale", C::kOfReductions, "prescale factor",
              "Every rank must pass the same factors.", kNotFused},
        QSGD_VALUE(args.prescale));
  visit(Field{"postscale", C::kOfReductions, "postscale factor",
              "Every rank must pass the same factors.", kNotFused},
        QSGD_VALUE(args.postscale));
  visit(Field{"coding", C::kOfReductions, "compression",
              "Every rank must compress alike; set QSGD_BITS for the whole job (qsgd-hpc run "
              "--bits does), not in one rank's shell."},
        QSGD_VALUE(coding));
  visit(Field{"lasting", C::kNever, "", "", kNotFused}, QSGD_VALUE(lasting));
  visit(Field{"check_finite", C::kOfReductions, "check for NaN",
              "A gradient and another tensor share this name; give each a name of its own.",
              kNotFused},
        QSGD_VALUE(check_finite));
  visit(Field{"on_device", C::kNever, "", "", kNotFused}, QSGD_VALUE(on_device));
#undef QSGD_VALUE
}

// For messages.
std::string describe(const Numbers& list);
std::string format_nmse(double nmse);  // three significant digits

void write(const Operation& operation, Writer& to);
Operation read_operation(Reader& from);
void write_list(const Numbers& list, Writer& to);
Numbers read_list(Reader& from);
void write_spec(const CodecSpec& spec, Writer& to);
CodecSpec read_spec(Reader& from);

// Throws a usage error if the `ranks` of the process set cannot execute it in a job of `size`
// ranks.
void check(const Operation& operation, const std::vector<int>& ranks, int size);

// The rows of an alltoall for each of `ranks` ranks.
Numbers splits_of(const Operation& operation, size_t ranks);

// Returns the difference between the operations that two ranks submitted with one name, with both
// values and the remedy; empty if there is none.
std::string difference(int rank_a, const Operation& a, int rank_b, const Operation& b);

// Whether one reduction may contain both.
bool fusable(const Operation& a, const Operation& b);

}  // namespace qsgd
