#include "engine/agreement.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace qsgd {
namespace {

const char* name_of(ReduceOp op) {
  static constexpr const char* kNames[] = {"sum", "average", "min", "max", "product", "adasum"};
  return kNames[static_cast<size_t>(op)];
}

std::string describe_coding(const Submission& s) {
  if (!s.coding) return "none";
  return describe(*s.coding) + (s.auto_bits ? " or fewer bits (auto)" : "") +
         (s.error_feedback ? " with error feedback" : "") +
         (s.nmse_budget > 0 ? ", NMSE budget " + format_nmse(s.nmse_budget) : "");
}

std::string describe_group(const Submission& s) {
  if (s.group.empty()) return "none";
  return "'" + s.group + "' of " + std::to_string(s.group_size);
}

std::string describe_scales(const Submission& s) {
  return std::to_string(s.args.prescale) + " and " + std::to_string(s.args.postscale);
}

bool same_coding(const Submission& a, const Submission& b) {
  return a.coding == b.coding && a.auto_bits == b.auto_bits &&
         a.error_feedback == b.error_feedback && a.nmse_budget == b.nmse_budget;
}

bool same_scales(const Submission& a, const Submission& b) {
  return a.args.prescale == b.args.prescale && a.args.postscale == b.args.postscale;
}

bool reduces(OpKind kind) { return kind == OpKind::kAllreduce || kind == OpKind::kReducescatter; }

// What each rank may have its own number of.
bool rows_may_differ(OpKind kind) {
  return kind == OpKind::kAllgather || kind == OpKind::kAlltoall;
}

bool same_shape(const Submission& a, const Submission& b) {
  const auto free = rows_may_differ(a.kind) ? 1 : 0;
  return a.shape.size() == b.shape.size() &&
         std::equal(a.shape.begin() + free, a.shape.end(), b.shape.begin() + free);
}

// The first fact in which the two differ: its name, both values and the remedy.
struct Difference {
  const char* what = nullptr;
  std::string of_a, of_b;
  const char* remedy = "";
};

Difference reduction_difference(const Submission& a, const Submission& b) {
  if (a.args.op != b.args.op) {
    return {"reduction", name_of(a.args.op), name_of(b.args.op),
            "Every rank must pass the same op."};
  }
  if (!same_scales(a, b)) {
    return {"prescale and postscale factors", describe_scales(a), describe_scales(b),
            "Every rank must pass the same factors."};
  }
  if (!same_coding(a, b)) {
    return {"compression", describe_coding(a), describe_coding(b),
            "Every rank must compress alike; set QSGD_BITS for the whole job (qsgd-hpc run --bits "
            "does), not in one rank's shell."};
  }
  if (a.check_finite != b.check_finite) {
    return {"check for NaN", a.check_finite ? "on" : "off", b.check_finite ? "on" : "off",
            "A gradient and another tensor share this name; give each a name of its own."};
  }
  return {};
}

Difference find_difference(const Submission& a, const Submission& b) {
  if (a.kind != b.kind) {
    return {"operation", describe(a.kind), describe(b.kind),
            "Every rank must call the same operation under one name."};
  }
  if (a.args.dtype != b.args.dtype) {
    return {"element type", facts(a.args.dtype).name, facts(b.args.dtype).name,
            "Every rank must submit the same type; cast the tensor before the call."};
  }
  if (!same_shape(a, b)) {
    return {"shape", describe(a.shape), describe(b.shape),
            rows_may_differ(a.kind)
                ? "All dimensions but the first must be equal on every rank."
                : "Every rank must submit equal shapes; check that the model is built identically "
                  "on every rank."};
  }
  if (a.root != b.root) {
    return {"root rank", std::to_string(a.root), std::to_string(b.root),
            "Every rank must name the same root."};
  }
  if (a.ranks != b.ranks) {
    return {"process set", describe(a.ranks), describe(b.ranks),
            "All ranks of the job must add and remove the same process sets in the same order."};
  }
  if (a.group != b.group || a.group_size != b.group_size) {
    return {"group", describe_group(a), describe_group(b),
            "Every rank must submit a group of the same tensors."};
  }
  return reduces(a.kind) ? reduction_difference(a, b) : Difference{};
}

}  // namespace

std::string format_nmse(double nmse) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.3g", nmse);
  return text.data();
}

std::string difference(int rank_a, const Submission& a, int rank_b, const Submission& b) {
  const Difference d = find_difference(a, b);
  if (d.what == nullptr) return {};
  return "tensor '" + a.name + "': rank " + std::to_string(rank_b) + " has " + d.what + " " +
         d.of_b + ", rank " + std::to_string(rank_a) + " has " + d.of_a + ". " + d.remedy;
}

bool fusable(const Submission& a, const Submission& b) {
  return a.kind == OpKind::kAllreduce && b.kind == OpKind::kAllreduce && a.set == b.set &&
         a.args.dtype == b.args.dtype && a.args.op == b.args.op && same_scales(a, b) &&
         a.coding.has_value() == b.coding.has_value() && a.check_finite == b.check_finite;
}

}  // namespace qsgd
