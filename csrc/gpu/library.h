// Loads the kernels, which are a library of their own: the core runs where there is no GPU.
#pragma once

#include <string>

#include "gpu/codec.h"

namespace qsgd::gpu {

// Throws a usage error with the remedy when the file is none of this version's.
const Library& load_library(const std::string& path);

}  // namespace qsgd::gpu
