#include "engine/operation.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>

#include "collectives/adasum.h"
#include "common/listed.h"
#include "quant/code.h"

namespace qsgd {
namespace {

std::string called(const Operation& o) {
  return std::string(describe(o.kind)) + " of '" + o.name + "'";
}

size_t product(Numbers::const_iterator begin, Numbers::const_iterator end) {
  size_t n = 1;
  for (; begin != end; ++begin) n *= static_cast<size_t>(*begin);
  return n;
}

// Encoding of values in messages.

template <class T>
void write(const T& number_or_text, Writer& to) {
  to.put(number_or_text);
}
void write(const Numbers& list, Writer& to) { write_list(list, to); }
void write(const Coding& coding, Writer& to) {
  write_spec(coding.spec, to);
  to.put(coding.choice);
  to.put(coding.error_feedback);
  to.put(coding.nmse_budget);
}
void write(const Group& group, Writer& to) {
  to.put(group.name);
  to.put(group.size);
}
template <class T>
void write(const std::optional<T>& value, Writer& to) {
  to.put(value.has_value());
  if (value) write(*value, to);
}

template <class T>
void read(Reader& from, T& number) {
  number = from.get<T>();
}
void read(Reader& from, std::string& text) { text = from.text(); }
void read(Reader& from, Numbers& list) { list = read_list(from); }
void read(Reader& from, Coding& coding) {
  coding.spec = read_spec(from);
  read(from, coding.choice);
  read(from, coding.error_feedback);
  read(from, coding.nmse_budget);
}
void read(Reader& from, Group& group) {
  read(from, group.name);
  read(from, group.size);
}
template <class T>
void read(Reader& from, std::optional<T>& value) {
  if (from.get<bool>()) read(from, value.emplace());
}

// Formatting of values for users.

const char* in_words(OpKind kind) { return describe(kind); }
const char* in_words(ReduceOp op) { return describe(op); }
const char* in_words(DType dtype) { return facts(dtype).name; }
const char* in_words(bool on) { return on ? "on" : "off"; }
template <class T>
std::string in_words(const T& number) {
  return std::to_string(number);
}
std::string in_words(const std::string& text) { return text; }
std::string in_words(const Numbers& list) { return describe(list); }
std::string in_words(const std::optional<Group>& group) {
  if (!group) return "none";
  return "'" + group->name + "' of " + std::to_string(group->size);
}
std::string in_words(const std::optional<Coding>& coding) {
  if (!coding) return "none";
  static constexpr std::array<const char*, 3> kChoices{"", " or fewer bits (auto)",
                                                       " or another code (auto)"};
  return describe(coding->spec) + kChoices.at(static_cast<size_t>(coding->choice)) +
         (coding->error_feedback ? " with error feedback" : "") +
         (coding->nmse_budget > 0 ? ", NMSE budget " + format_nmse(coding->nmse_budget) : "");
}

// Whether each rank may have its own number of rows.
bool rows_may_differ(OpKind kind) {
  return kind == OpKind::kAllgather || kind == OpKind::kAlltoall;
}

template <class T>
bool same_but_rows(const T& a, const T& b) {
  return a == b;
}
bool same_but_rows(const Numbers& a, const Numbers& b) {
  return a.size() == b.size() && (a.empty() || std::equal(a.begin() + 1, a.end(), b.begin() + 1));
}

bool must_be_equal(const Field& field, OpKind kind) {
  if (field.compared == Compared::kOfReductions) return reduces(kind);
  return field.compared != Compared::kNever;
}

void check_splits(const Operation& o, int size) {
  if (o.splits.empty()) {
    if (o.rows() % size == 0) return;
    throw usage_error(called(o) + ": its " + std::to_string(o.rows()) +
                      " rows cannot be divided evenly among " + std::to_string(size) +
                      " ranks; pass splits");
  }
  const int64_t sum = std::accumulate(o.splits.begin(), o.splits.end(), int64_t{0});
  const bool negative = std::any_of(o.splits.begin(), o.splits.end(), [](auto n) { return n < 0; });
  if (o.splits.size() != static_cast<size_t>(size) || sum != o.rows() || negative) {
    throw usage_error(called(o) + ": splits=" + describe(o.splits) + " for " +
                      std::to_string(size) + " ranks and " + std::to_string(o.rows()) +
                      " rows; pass one number per rank, none negative, that add up to the rows");
  }
}

void check_ranks(const Operation& o, int size) {
  const Numbers& ranks = o.ranks;
  const bool ordered = std::adjacent_find(ranks.begin(), ranks.end(),
                                          [](auto a, auto b) { return a >= b; }) == ranks.end();
  if (!ranks.empty() && ordered && ranks.front() >= 0 && ranks.back() < size) return;
  throw usage_error("process set " + describe(ranks) + " of a job of " + std::to_string(size) +
                    " ranks; list each of its ranks once, from 0 to " + std::to_string(size - 1));
}

void check_root(const Operation& o, const std::vector<int>& ranks, int size) {
  if (o.root < 0 || o.root >= size) {
    throw usage_error(called(o) + ": root_rank=" + std::to_string(o.root) +
                      " is not a rank of this job; it has ranks 0 to " + std::to_string(size - 1));
  }
  if (std::count(ranks.begin(), ranks.end(), o.root) == 0) {
    throw usage_error(called(o) + ": root_rank=" + std::to_string(o.root) +
                      " is not in process set " + std::to_string(o.set) +
                      "; name a rank of it, counted in the whole job");
  }
}

void check_coding(const Operation& o) {
  check(o.coding->spec);
  if (o.coding->choice != Choice::kNothing && !traits_of(o.coding->spec.scheme).has_choice()) {
    throw usage_error(called(o) + ": bits=auto with " + describe(o.coding->spec) +
                      ", which has no choice of bits; leave bits out");
  }
  if (o.coding->choice == Choice::kCode) {
    CodecSpec rotated = o.coding->spec;
    rotated.scheme = Scheme::kEden;
    check(rotated);
  }
  if (facts(o.args.dtype).floating && o.args.op <= ReduceOp::kAverage) return;
  throw usage_error(called(o) +
                    ": sums and averages of floating types can be compressed, not others; use "
                    "Compression.none for this tensor");
}

}  // namespace

const char* describe(OpKind kind) {
  static constexpr std::array<const char*, kOpKinds> kNames{
      "allreduce", "broadcast", "allgather",       "alltoall",          "reducescatter",
      "barrier",   "join",      "add_process_set", "remove_process_set"};
  return kNames.at(static_cast<size_t>(kind));
}

std::string describe(const Numbers& list) { return "[" + listed(list) + "]"; }

std::string format_nmse(double nmse) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.3g", nmse);
  return text.data();
}

bool has_rows(OpKind kind) {
  return kind == OpKind::kAllgather || kind == OpKind::kAlltoall || kind == OpKind::kReducescatter;
}

bool reduces(OpKind kind) { return kind == OpKind::kAllreduce || kind == OpKind::kReducescatter; }

bool changes_ranks(OpKind kind) {
  return kind == OpKind::kJoin || kind == OpKind::kAddSet || kind == OpKind::kRemoveSet;
}

size_t Operation::count() const { return product(shape.begin(), shape.end()); }
size_t Operation::row_count() const { return product(shape.begin() + 1, shape.end()); }

bool operator==(const Operation& a, const Operation& b) {
  bool equal = true;
  visit_fields([&](const Field&, auto get) { equal = equal && get(a) == get(b); });
  return equal;
}

void write(const Operation& operation, Writer& to) {
  visit_fields([&](const Field& field, auto get) {
    if (field.is_sent) write(get(operation), to);
  });
}

Operation read_operation(Reader& from) {
  Operation operation;
  visit_fields([&](const Field& field, auto get) {
    if (field.is_sent) read(from, get(operation));
  });
  return operation;
}

void write_list(const Numbers& list, Writer& to) {
  to.put(static_cast<uint32_t>(list.size()));
  for (const int64_t n : list) to.put(n);
}

Numbers read_list(Reader& from) {
  Numbers list(from.get<uint32_t>());
  for (int64_t& n : list) n = from.get<int64_t>();
  return list;
}

void write_spec(const CodecSpec& spec, Writer& to) {
  to.put(spec.scheme);
  to.put(static_cast<uint8_t>(spec.bits));
  to.put(spec.norm);
  to.put(spec.rounding);
  to.put(spec.bucket);
  to.put(spec.k);
  to.put(spec.contract);
}

CodecSpec read_spec(Reader& from) {
  CodecSpec spec;
  spec.scheme = from.get<Scheme>();
  spec.bits = from.get<uint8_t>();
  spec.norm = from.get<Norm>();
  spec.rounding = from.get<Rounding>();
  spec.bucket = from.get<uint32_t>();
  spec.k = from.get<uint32_t>();
  spec.contract = from.get<bool>();
  return spec;
}

void check(const Operation& o, const std::vector<int>& ranks, int size) {
  if (o.name.empty() || o.name.size() > kMaxName) {
    throw usage_error("tensor name of " + std::to_string(o.name.size()) + " bytes: use 1 to " +
                      std::to_string(kMaxName));
  }
  if (o.kind == OpKind::kBroadcast) check_root(o, ranks, size);
  if (has_rows(o.kind) && o.shape.empty()) {
    throw usage_error(called(o) + ": a tensor without dimensions has no rows; reshape it to [1]");
  }
  if (o.kind == OpKind::kAlltoall) check_splits(o, static_cast<int>(ranks.size()));
  if (o.kind == OpKind::kAddSet) check_ranks(o, size);
  if (o.group && (o.group->size == 0 || o.group->name.empty() || o.group->name.size() > kMaxName)) {
    throw usage_error(called(o) + ": group_size=" + std::to_string(o.group->size) +
                      " for a group name of " + std::to_string(o.group->name.size()) +
                      " bytes; a group has one operation or more, and a name of 1 to " +
                      std::to_string(kMaxName));
  }
  if (o.args.op == ReduceOp::kAdasum) {
    if (o.kind != OpKind::kAllreduce) {
      throw usage_error(called(o) + ": Adasum combines whole tensors; use allreduce with it");
    }
    check_adasum(o.args.dtype, o.coding.has_value());
  }
  if (o.coding) check_coding(o);
}

Numbers splits_of(const Operation& o, size_t ranks) {
  return o.splits.empty() ? Numbers(ranks, o.rows() / static_cast<int64_t>(ranks)) : o.splits;
}

std::string difference(int rank_a, const Operation& a, int rank_b, const Operation& b) {
  std::string text;
  visit_fields([&](const Field& field, auto get) {
    if (!text.empty() || !must_be_equal(field, a.kind)) return;
    const bool own_rows = field.compared == Compared::kButRows && rows_may_differ(a.kind);
    if (own_rows ? same_but_rows(get(a), get(b)) : get(a) == get(b)) return;
    text = "tensor '" + a.name + "': rank " + std::to_string(rank_b) + " has " + field.what + " " +
           in_words(get(b)) + ", rank " + std::to_string(rank_a) + " has " + in_words(get(a)) +
           ". " +
           (own_rows ? "All dimensions but the first must be equal on every rank." : field.remedy);
  });
  return text;
}

bool fusable(const Operation& a, const Operation& b) {
  bool alike = a.kind == OpKind::kAllreduce;
  visit_fields(
      [&](const Field& field, auto get) { alike = alike && (field.fuses || get(a) == get(b)); });
  return alike;
}

}  // namespace qsgd
