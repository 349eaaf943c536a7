#include "collectives/floats.h"

#include <cmath>

#include "common/clones.h"

namespace qsgd {
namespace {

QSGD_CLONES
void scale(float by, size_t count, float* x) {
  for (size_t i = 0; i < count; ++i) x[i] *= by;
}

QSGD_CLONES
Quality quality(const float* value, const float* sent, size_t count) {
  constexpr int kLanes = 8;  // a fixed number, so that every instruction set gives the same sums
  double error[kLanes] = {}, energy[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double v = value[i + lane], d = v - sent[i + lane];
      error[lane] += d * d;
      energy[lane] += v * v;
    }
  }
  for (; i < count; ++i) {
    const double v = value[i], d = v - sent[i];
    error[0] += d * d;
    energy[0] += v * v;
  }
  Quality q;
  for (int lane = 0; lane < kLanes; ++lane) q += {error[lane], energy[lane]};
  return std::isfinite(q.error) ? q : Quality{};
}

}  // namespace

void scale_floats(float by, size_t count, float* x) { scale(by, count, x); }

Quality compare(const float* value, const float* sent, size_t count) {
  return quality(value, sent, count);
}

}  // namespace qsgd
