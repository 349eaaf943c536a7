#include "common/dtype.h"

#include <string>

#include "common/error.h"

namespace qsgd {

void refuse_unknown(DType t) {
  throw internal_error("element type " + std::to_string(static_cast<int>(t)) + " unknown");
}

}  // namespace qsgd
