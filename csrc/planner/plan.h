// Which algorithm, how many bits, or no compression at all, and why. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "planner/cost_model.h"

namespace qsgd {

struct PlanRequest {
  // Codes that may be used; empty asks for float32.
  std::vector<CodecSpec> codecs;
  Algorithm exact = Algorithm::kAuto;
  Algorithm coded = Algorithm::kAuto;
  // Whether auto leaves the choice to the plan, among all algorithms that were observed. Else it is
  // what the machine says, whose bits do not depend on what a tensor is fused with.
  bool any_algorithm = false;
  // A step to a code that loses more, the first from float32, must save this part of the time:
  // errors are not taken for a gain that the noise of a measurement could explain.
  double worth = 0.05;
};

struct Plan {
  Algorithm algorithm = Algorithm::kDirect;
  std::optional<CodecSpec> spec;  // none: float32
  double seconds = 0;
  double exact_seconds = 0;  // of float32
  std::string reason;        // one line, with numbers
};

// An algorithm and the seconds that it takes.
struct Way {
  Algorithm algorithm = Algorithm::kAuto;
  double seconds = 0;
};

// The fastest way to reduce `count` float32 in this code, or in none. Of ways as fast as each other
// the first that was observed.
Way fastest(const Machine& machine, size_t count, const std::optional<CodecSpec>& spec,
            const PlanRequest& request);

// The plan for one allreduce of `count` float32. The same machine, count and request give the same
// plan, in whatever order the codecs are listed.
Plan choose(const Machine& machine, size_t count, const PlanRequest& request);

// The least count from which on `spec` is chosen over float32, or nothing if up to 2^30 elements it
// is not.
std::optional<size_t> threshold(const Machine& machine, const CodecSpec& spec,
                                const PlanRequest& request);

}  // namespace qsgd
