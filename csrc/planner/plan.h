// Choice of algorithm, bits, or no compression, with the reason. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "planner/cost_model.h"

namespace qsgd {

struct PlanRequest {
  // Codes that may be used; empty: float32.
  std::vector<CodecSpec> codecs;
  Algorithm exact = Algorithm::kAuto;
  Algorithm coded = Algorithm::kAuto;
  // Whether auto may use any observed algorithm. Otherwise it uses the machine's, whose bits do not
  // depend on fusion.
  bool any_algorithm = false;
  // Minimum saving, as a fraction of the time, for each step to a less accurate code, the first
  // from float32: an error is not worth a gain within the measurement noise.
  double worth = 0.05;
};

struct Plan {
  Algorithm algorithm = Algorithm::kDirect;
  std::optional<CodecSpec> spec;  // empty: float32
  double seconds = 0;
  double exact_seconds = 0;  // of float32
  std::string reason;        // one line, with numbers
};

// An algorithm and its predicted time.
struct Prediction {
  Algorithm algorithm = Algorithm::kAuto;
  double seconds = 0;
};

// The fastest algorithm for `count` float32 elements with this code, or without. Of equally fast
// ones, the first that was observed.
Prediction fastest(const Machine& machine, size_t count, const std::optional<CodecSpec>& spec,
                   const PlanRequest& request);

// The plan for one allreduce of `count` float32 elements. The same machine, count and request give
// the same plan, for any order of the codecs.
Plan choose(const Machine& machine, size_t count, const PlanRequest& request);

// A count for which `spec` is chosen over float32, for one element less it is not, and from which
// on it is for every power of two up to 2^30; nothing if it is not for 2^30. Measured times are no
// smooth function of the count, so it may be chosen for some smaller counts, too.
std::optional<size_t> threshold(const Machine& machine, const CodecSpec& spec,
                                const PlanRequest& request);

// Formatting of numbers for messages.
std::string time_text(double seconds);  // "1.25 ms"
std::string size_text(double bytes);    // "512 KiB"

}  // namespace qsgd
