#include "collectives/floats.h"

#include <cmath>

#include "common/clones.h"

namespace qsgd {
namespace {

QSGD_CLONES
void scale(float by, size_t count, float* x) {
  for (size_t i = 0; i < count; ++i) x[i] *= by;
}

// Without a Quality: ziglang's Clang does not emit the constructors that only clones call.
QSGD_CLONES
void add_squares(const float* value, const float* sent, size_t count, double* error_sum,
                 double* energy_sum) {
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
  for (int lane = 0; lane < kLanes; ++lane) {
    *error_sum += error[lane];
    *energy_sum += energy[lane];
  }
}

}  // namespace

void scale_floats(float by, size_t count, float* x) { scale(by, count, x); }

Quality compare(const float* value, const float* sent, size_t count) {
  Quality q;
  add_squares(value, sent, count, &q.error, &q.energy);
  return std::isfinite(q.error) ? q : Quality{};
}

}  // namespace qsgd
