// The codes that the planner measures, and those between which it chooses.
#pragma once

#include <vector>

#include "quant/codec.h"

namespace qsgd {

// QSGD's, whose allreduces are measured.
std::vector<CodecSpec> usual_codes();

// EDEN's, which are only timed.
std::vector<CodecSpec> rotated_codes();

// The codes between which a plan chooses if the user leaves the bits of a code open, or
// (`any_code`) the code, too: those with its settings, the most accurate first.
std::vector<CodecSpec> open_codes(const CodecSpec& spec, bool any_code);

}  // namespace qsgd
