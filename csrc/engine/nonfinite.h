// Origin of NaN and Inf in results, and the error messages.
#pragma once

#include <string>
#include <vector>

#include "collectives/allreduce.h"

namespace qsgd {

enum class NonFinite { kError, kWarn, kPropagate };

// Returns, for each tensor, an empty string or a sentence without its full stop if the result is
// not finite. Results are equal on all ranks, so every rank calls this with the same tensors; one
// more small exchange finds the ranks whose input was not finite. `ranks`: the communicator's
// ranks, as numbered in messages.
std::vector<std::string> explain_nonfinite(Communicator& communicator,
                                           const std::vector<int>& ranks,
                                           const std::vector<std::string>& names,
                                           const std::vector<ReduceTensor>& tensors);

}  // namespace qsgd
