// What is to be done with one tensor, on all ranks alike: a value that nobody changes once it is
// handed in, so that whoever needs it shares it.
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
// Whether it deals with the first dimension apart from the others.
bool has_rows(OpKind kind);
bool reduces(OpKind kind);
// Whether others take part from then on in what comes, so that all must hear of it.
bool changes_ranks(OpKind kind);

constexpr size_t kMaxName = 1024;  // bytes

// How a tensor is asked to travel.
struct Coding {
  CodecSpec spec;
  bool auto_bits = false;  // or in 8 or 4 bits, or in none at all, as the planner says
  bool error_feedback = false;
  double nmse_budget = 0;  // 0: none; else a spec that exceeds it gets more bits

  bool operator==(const Coding& o) const {
    return spec == o.spec && auto_bits == o.auto_bits && error_feedback == o.error_feedback &&
           nmse_budget == o.nmse_budget;
  }
  bool operator!=(const Coding& o) const { return !(*this == o); }
};

// Operations of one group are carried out, and end, together.
struct Group {
  std::string name;
  uint32_t size = 0;

  bool operator==(const Group& o) const { return size == o.size && name == o.name; }
  bool operator!=(const Group& o) const { return !(*this == o); }
};

struct Operation {
  OpKind kind = OpKind::kAllreduce;
  std::string name;  // its own within the process set; empty: the engine gives it one
  int32_t set = 0;   // process set; 0 is everyone
  Numbers shape;
  ReduceArgs args;  // dtype for every kind; the rest for the reductions
  int32_t root = 0;
  Numbers splits;  // for alltoall: rows for each rank; empty: as many for each
  Numbers ranks;   // of a process set to add, in ascending order; or the number of one to remove
  std::optional<Group> group;
  std::optional<Coding> coding;  // none: travels as it is
  bool lasting = false;          // the name comes again, so what is known of it is kept
  bool check_finite = false;     // NaN or Inf in the result is an event to report
  bool on_device = false;        // its tensor is in a device's memory; the engine sees to this

  Key key() const { return {set, name}; }
  size_t count() const;
  size_t size_bytes() const { return count() * facts(args.dtype).size; }
  // Of what the first dimension counts.
  int64_t rows() const { return shape.front(); }
  size_t row_count() const;  // elements
  size_t row_bytes() const { return row_count() * facts(args.dtype).size; }
};
bool operator==(const Operation& a, const Operation& b);

using OperationPtr = std::shared_ptr<const Operation>;

// Whose values of a field are compared before an operation is carried out.
enum class Compared : uint8_t {
  kNever,
  kAlways,
  kButRows,       // but for the first number, of which each rank may have its own
  kOfReductions,  // and of no others
};

// What there is to know of a field, and for which purposes it counts.
struct Field {
  const char* name;  // in Python
  Compared compared = Compared::kNever;
  const char* what = "";    // the ranks differ in, and
  const char* remedy = "";  // what they are told then
  bool fuses = true;        // tensors that differ in it may still share a message
  bool travels = true;      // to rank 0
};

// Calls visit(Field, get) for all that an operation consists of; get(operation) is the value. What
// Python passes, messages, comparisons and texts are made from this list, in its order.
template <class Visit>
void visit_fields(const Visit& visit) {
#define QSGD_VALUE(member) [](auto& operation) -> auto& { return operation.member; }
  using C = Compared;
  constexpr bool kApart = false;
  visit(Field{"kind", C::kAlways, "operation",
              "Every rank must call the same operation under one name.", kApart},
        QSGD_VALUE(kind));
  visit(Field{"name"}, QSGD_VALUE(name));
  visit(Field{"process_set", C::kNever, "", "", kApart}, QSGD_VALUE(set));
  visit(Field{"dtype", C::kAlways, "element type",
              "Every rank must submit the same type; cast the tensor before the call.", kApart},
        QSGD_VALUE(args.dtype));
  visit(Field{"shape", C::kButRows, "shape",
              "Every rank must submit equal shapes; check that the model is built identically on "
              "every rank."},
        QSGD_VALUE(shape));
  visit(Field{"root", C::kAlways, "root rank", "Every rank must name the same root.", kApart},
        QSGD_VALUE(root));
  visit(Field{"splits", C::kNever, "", "", kApart, /*travels=*/false}, QSGD_VALUE(splits));
  visit(Field{"ranks", C::kAlways, "process set",
              "All ranks of the job must add and remove the same process sets in the same order.",
              kApart},
        QSGD_VALUE(ranks));
  visit(Field{"group", C::kAlways, "group", "Every rank must submit a group of the same tensors."},
        QSGD_VALUE(group));
  visit(Field{"op", C::kOfReductions, "reduction", "Every rank must pass the same op.", kApart},
        QSGD_VALUE(args.op));
  visit(Field{"prescale", C::kOfReductions, "prescale factor",
              "Every rank must pass the same factors.", kApart},
        QSGD_VALUE(args.prescale));
  visit(Field{"postscale", C::kOfReductions, "postscale factor",
              "Every rank must pass the same factors.", kApart},
        QSGD_VALUE(args.postscale));
  visit(Field{"coding", C::kOfReductions, "compression",
              "Every rank must compress alike; set QSGD_BITS for the whole job (qsgd-hpc run "
              "--bits does), not in one rank's shell."},
        QSGD_VALUE(coding));
  visit(Field{"lasting", C::kNever, "", "", kApart}, QSGD_VALUE(lasting));
  visit(
      Field{"check_finite", C::kOfReductions, "check for NaN",
            "A gradient and another tensor share this name; give each a name of its own.", kApart},
      QSGD_VALUE(check_finite));
  visit(Field{"on_device", C::kNever, "", "", kApart}, QSGD_VALUE(on_device));
#undef QSGD_VALUE
}

// For messages.
std::string describe(const Numbers& list);
std::string format_nmse(double nmse);  // three digits are enough of an error

void write(const Operation& operation, Writer& to);
Operation read_operation(Reader& from);
void write_list(const Numbers& list, Writer& to);
Numbers read_list(Reader& from);
void write_spec(const CodecSpec& spec, Writer& to);
CodecSpec read_spec(Reader& from);

// Throws a usage error for what the `ranks` of the process set cannot do in a job of `size` ranks.
void check(const Operation& operation, const std::vector<int>& ranks, int size);

// The rows of an alltoall for each of so many ranks.
Numbers splits_of(const Operation& operation, size_t ranks);

// Empty where the operations that two ranks have of one name are one; else what differs, with both
// values and the remedy.
std::string difference(int rank_a, const Operation& a, int rank_b, const Operation& b);

// Whether one reduction may carry both.
bool fusable(const Operation& a, const Operation& b);

}  // namespace qsgd
