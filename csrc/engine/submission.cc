#include "engine/submission.h"

#include <algorithm>

namespace qsgd {
namespace {

std::string describe(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

const char* describe(OpKind kind) { return kind == OpKind::kAllreduce ? "allreduce" : "broadcast"; }

const char* describe(ReduceOp op) {
  static constexpr const char* kNames[] = {"sum", "average", "min", "max", "product"};
  return kNames[static_cast<size_t>(op)];
}

std::string describe_coding(const Submission& s) {
  if (!s.quantised) return "none";
  return "qsgd(bits=" + std::to_string(s.spec.bits) +
         ", bucket_size=" + std::to_string(s.spec.bucket) +
         ", norm=" + (s.spec.norm == Norm::kMax ? "max" : "l2") + ")";
}

std::string describe_scales(const Submission& s) {
  return std::to_string(s.args.prescale) + " and " + std::to_string(s.args.postscale);
}

bool same_coding(const Submission& a, const Submission& b) {
  return a.quantised == b.quantised && (!a.quantised || a.spec == b.spec);
}

bool same_scales(const Submission& a, const Submission& b) {
  return a.args.prescale == b.args.prescale && a.args.postscale == b.args.postscale;
}

}  // namespace

size_t Submission::count() const {
  size_t n = 1;
  for (const int64_t extent : shape) n *= static_cast<size_t>(extent);
  return n;
}

void Submission::write(Writer& to) const {
  to.put(name);
  to.put(kind);
  to.put(static_cast<uint8_t>(shape.size()));
  for (const int64_t extent : shape) to.put(extent);
  to.put(args.dtype);
  to.put(args.op);
  to.put(args.prescale);
  to.put(args.postscale);
  to.put(root);
  to.put(static_cast<uint8_t>(quantised));
  to.put(static_cast<uint8_t>(spec.bits));
  to.put(spec.norm);
  to.put(spec.bucket);
  to.put(static_cast<uint8_t>(check_finite));
}

Submission Submission::read(Reader& from) {
  Submission s;
  s.name = from.text();
  s.kind = from.get<OpKind>();
  s.shape.resize(from.get<uint8_t>());
  for (int64_t& extent : s.shape) extent = from.get<int64_t>();
  s.args.dtype = from.get<DType>();
  s.args.op = from.get<ReduceOp>();
  s.args.prescale = from.get<double>();
  s.args.postscale = from.get<double>();
  s.root = from.get<int32_t>();
  s.quantised = from.get<uint8_t>() != 0;
  s.spec.bits = from.get<uint8_t>();
  s.spec.norm = from.get<Norm>();
  s.spec.bucket = from.get<uint32_t>();
  s.check_finite = from.get<uint8_t>() != 0;
  return s;
}

std::string difference(int rank_a, const Submission& a, int rank_b, const Submission& b) {
  const auto say = [&](const char* what, const std::string& of_a, const std::string& of_b,
                       const char* remedy) {
    return "tensor '" + a.name + "': rank " + std::to_string(rank_b) + " has " + what + " " + of_b +
           ", rank " + std::to_string(rank_a) + " has " + of_a + ". " + remedy;
  };
  if (a.kind != b.kind) {
    return say("operation", describe(a.kind), describe(b.kind),
               "Every rank must call the same operation under one name.");
  }
  if (a.args.dtype != b.args.dtype) {
    return say("element type", facts(a.args.dtype).name, facts(b.args.dtype).name,
               "Every rank must submit the same type; cast the tensor before the call.");
  }
  if (a.shape != b.shape) {
    return say("shape", describe(a.shape), describe(b.shape),
               "Every rank must submit equal shapes; check that the model is built identically on "
               "every rank.");
  }
  if (a.kind == OpKind::kBroadcast) {
    if (a.root == b.root) return {};
    return say("root rank", std::to_string(a.root), std::to_string(b.root),
               "Every rank must name the same root.");
  }
  if (a.args.op != b.args.op) {
    return say("reduction", describe(a.args.op), describe(b.args.op),
               "Every rank must pass the same op.");
  }
  if (!same_scales(a, b)) {
    return say("prescale and postscale factors", describe_scales(a), describe_scales(b),
               "Every rank must pass the same factors.");
  }
  if (!same_coding(a, b)) {
    return say("compression", describe_coding(a), describe_coding(b),
               "Every rank must compress alike; set QSGD_BITS for the whole job (qsgd-hpc run "
               "--bits does), not in one rank's shell.");
  }
  if (a.check_finite != b.check_finite) {
    return say("check for NaN", a.check_finite ? "on" : "off", b.check_finite ? "on" : "off",
               "A gradient and another tensor share this name; give each a name of its own.");
  }
  return {};
}

bool fusable(const Submission& a, const Submission& b) {
  return a.kind == OpKind::kAllreduce && b.kind == OpKind::kAllreduce &&
         a.args.dtype == b.args.dtype && a.args.op == b.args.op && same_scales(a, b) &&
         same_coding(a, b) && a.check_finite == b.check_finite;
}

}  // namespace qsgd
