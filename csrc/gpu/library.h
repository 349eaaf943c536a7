// Loads the kernels, which are a library of their own: the core runs where there is no GPU.
#pragma once

#include <string>

#include "gpu/codec.h"

namespace qsgd::gpu {

// Throws a usage error with the remedy when the file is none of this version's.
const Library& load_library(const std::string& path);

// Why the kernels cannot be used on a device that this process sees; empty: they can. A driver may
// be older than they are, or the device one that they were not compiled for.
std::string fault_of(const Library& library, int device);

}  // namespace qsgd::gpu
