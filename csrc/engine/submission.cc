#include "engine/submission.h"

#include <algorithm>
#include <numeric>

#include "collectives/adasum.h"
#include "quant/code.h"

namespace qsgd {
namespace {

std::string called(const Submission& s) {
  return std::string(describe(s.kind)) + " of '" + s.name + "'";
}

void settle_splits(Submission& s, int size) {
  if (s.splits.empty()) {
    if (s.rows() % size != 0) {
      throw usage_error(called(s) + ": its " + std::to_string(s.rows()) +
                        " rows cannot be cut evenly for " + std::to_string(size) +
                        " ranks; pass splits");
    }
    s.splits.assign(static_cast<size_t>(size), s.rows() / size);
  }
  const int64_t sum = std::accumulate(s.splits.begin(), s.splits.end(), int64_t{0});
  const bool negative = std::any_of(s.splits.begin(), s.splits.end(), [](auto n) { return n < 0; });
  if (s.splits.size() != static_cast<size_t>(size) || sum != s.rows() || negative) {
    throw usage_error(called(s) + ": splits=" + describe(s.splits) + " for " +
                      std::to_string(size) + " ranks and " + std::to_string(s.rows()) +
                      " rows; pass one number per rank, none negative, that add up to the rows");
  }
}

// In ascending order, so that equal sets are found equal.
void settle_ranks(Submission& s, int size) {
  std::vector<int64_t>& ranks = s.ranks;
  std::sort(ranks.begin(), ranks.end());
  const bool twice = std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end();
  if (!ranks.empty() && !twice && ranks.front() >= 0 && ranks.back() < size) return;
  throw usage_error("process set " + describe(ranks) + " of a job of " + std::to_string(size) +
                    " ranks; list each of its ranks once, from 0 to " + std::to_string(size - 1));
}

void check_coding(const Submission& s) {
  check(*s.coding);
  if (s.auto_bits && !traits_of(s.coding->scheme).has_choice()) {
    throw usage_error(called(s) + ": bits=auto with " + describe(*s.coding) +
                      ", which has no choice of bits; leave bits out");
  }
  if (facts(s.args.dtype).floating && s.args.op <= ReduceOp::kAverage) return;
  throw usage_error(called(s) +
                    ": sums and averages of floating types can be compressed, not others; use "
                    "Compression.none for this tensor");
}

}  // namespace

const char* describe(OpKind kind) {
  static constexpr const char* kNames[] = {"allreduce", "broadcast",       "allgather",
                                           "alltoall",  "reducescatter",   "barrier",
                                           "join",      "add_process_set", "remove_process_set"};
  return kNames[static_cast<size_t>(kind)];
}

std::string describe(const std::vector<int64_t>& list) {
  std::string text = "[";
  for (size_t i = 0; i < list.size(); ++i) text += (i ? ", " : "") + std::to_string(list[i]);
  return text + "]";
}

bool has_rows(OpKind kind) {
  return kind == OpKind::kAllgather || kind == OpKind::kAlltoall || kind == OpKind::kReducescatter;
}

void settle(Submission& s, const std::vector<int>& ranks, int size) {
  if (s.name.empty() || s.name.size() > kMaxName) {
    throw usage_error("tensor name of " + std::to_string(s.name.size()) + " bytes: use 1 to " +
                      std::to_string(kMaxName));
  }
  if (s.kind == OpKind::kBroadcast && (s.root < 0 || s.root >= size)) {
    throw usage_error(called(s) + ": root_rank=" + std::to_string(s.root) +
                      " is not a rank of this job; it has ranks 0 to " + std::to_string(size - 1));
  }
  if (s.kind == OpKind::kBroadcast && std::count(ranks.begin(), ranks.end(), s.root) == 0) {
    throw usage_error(called(s) + ": root_rank=" + std::to_string(s.root) +
                      " is not in process set " + std::to_string(s.set) +
                      "; name a rank of it, counted in the whole job");
  }
  if (has_rows(s.kind) && s.shape.empty()) {
    throw usage_error(called(s) + ": a tensor without dimensions has no rows; reshape it to [1]");
  }
  if (s.kind == OpKind::kAlltoall) settle_splits(s, static_cast<int>(ranks.size()));
  if (s.kind == OpKind::kAddSet) settle_ranks(s, size);
  if (!s.group.empty() && (s.group_size == 0 || s.group.size() > kMaxName)) {
    throw usage_error(called(s) + ": group_size=" + std::to_string(s.group_size) + " for a group " +
                      "name of " + std::to_string(s.group.size()) + " bytes; a group has one " +
                      "operation or more, and a name of at most " + std::to_string(kMaxName));
  }
  if (s.args.op == ReduceOp::kAdasum) {
    if (s.kind != OpKind::kAllreduce) {
      throw usage_error(called(s) + ": Adasum combines whole tensors; use allreduce with it");
    }
    check_adasum(s.args.dtype, s.coding.has_value());
  }
  if (s.coding) check_coding(s);
}

size_t Submission::count() const {
  size_t n = 1;
  for (const int64_t extent : shape) n *= static_cast<size_t>(extent);
  return n;
}

size_t Submission::row_count() const {
  size_t n = 1;
  for (size_t i = 1; i < shape.size(); ++i) n *= static_cast<size_t>(shape[i]);
  return n;
}

void Submission::write(Writer& to) const {
  to.put(name);
  to.put(set);
  to.put(kind);
  to.put(static_cast<uint8_t>(shape.size()));
  for (const int64_t extent : shape) to.put(extent);
  to.put(args.dtype);
  to.put(args.op);
  to.put(args.prescale);
  to.put(args.postscale);
  to.put(root);
  write_list(ranks, to);
  to.put(group);
  to.put(group_size);
  write_coding(coding, to);
  to.put(static_cast<uint8_t>(auto_bits));
  to.put(static_cast<uint8_t>(error_feedback));
  to.put(nmse_budget);
  to.put(static_cast<uint8_t>(lasting));
  to.put(static_cast<uint8_t>(check_finite));
}

Submission Submission::read(Reader& from) {
  Submission s;
  s.name = from.text();
  s.set = from.get<int32_t>();
  s.kind = from.get<OpKind>();
  s.shape.resize(from.get<uint8_t>());
  for (int64_t& extent : s.shape) extent = from.get<int64_t>();
  s.args.dtype = from.get<DType>();
  s.args.op = from.get<ReduceOp>();
  s.args.prescale = from.get<double>();
  s.args.postscale = from.get<double>();
  s.root = from.get<int32_t>();
  s.ranks = read_list(from);
  s.group = from.text();
  s.group_size = from.get<uint32_t>();
  s.coding = read_coding(from);
  s.auto_bits = from.get<uint8_t>() != 0;
  s.error_feedback = from.get<uint8_t>() != 0;
  s.nmse_budget = from.get<double>();
  s.lasting = from.get<uint8_t>() != 0;
  s.check_finite = from.get<uint8_t>() != 0;
  return s;
}

void write_list(const std::vector<int64_t>& list, Writer& to) {
  to.put(static_cast<uint32_t>(list.size()));
  for (const int64_t n : list) to.put(n);
}

std::vector<int64_t> read_list(Reader& from) {
  std::vector<int64_t> list(from.get<uint32_t>());
  for (int64_t& n : list) n = from.get<int64_t>();
  return list;
}

void write_coding(const std::optional<CodecSpec>& coding, Writer& to) {
  to.put(static_cast<uint8_t>(coding.has_value()));
  if (!coding) return;
  to.put(coding->scheme);
  to.put(static_cast<uint8_t>(coding->bits));
  to.put(coding->norm);
  to.put(coding->rounding);
  to.put(coding->bucket);
  to.put(coding->k);
  to.put(static_cast<uint8_t>(coding->contract));
}

std::optional<CodecSpec> read_coding(Reader& from) {
  if (from.get<uint8_t>() == 0) return std::nullopt;
  CodecSpec spec;
  spec.scheme = from.get<Scheme>();
  spec.bits = from.get<uint8_t>();
  spec.norm = from.get<Norm>();
  spec.rounding = from.get<Rounding>();
  spec.bucket = from.get<uint32_t>();
  spec.k = from.get<uint32_t>();
  spec.contract = from.get<uint8_t>() != 0;
  return spec;
}

}  // namespace qsgd
