// Loads the kernels, which are a separate library, because the core must run without a GPU.
#pragma once

#include <string>

#include "gpu/codec.h"

namespace qsgd::gpu {

// Throws a usage error with the remedy if the file is not of this version.
const Library& load_library(const std::string& path);

// Returns why the kernels do not work on a visible device; empty if they do. The driver may be too
// old, or the kernels not compiled for the device.
std::string fault_of(const Library& library, int device);

}  // namespace qsgd::gpu
