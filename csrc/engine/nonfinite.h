// NaN and Inf in results: whose they are, and what to tell.
#pragma once

#include <string>
#include <vector>

#include "collectives/allreduce.h"

namespace qsgd {

enum class NonFinite { kError, kWarn, kPropagate };

// One sentence, without its end, for each tensor whose result is not finite, empty for the others.
// The results are equal everywhere, so every rank comes here with the same bad tensors; whose they
// were takes one more small exchange. `ranks` are the communicator's, as messages name them.
std::vector<std::string> explain_nonfinite(Communicator& communicator,
                                           const std::vector<int>& ranks,
                                           const std::vector<std::string>& names,
                                           const std::vector<ReduceTensor>& tensors);

}  // namespace qsgd
