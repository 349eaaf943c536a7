// What the parts of the stress program share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

inline void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

// Runs engines of 1 to 5 thread ranks through every kind of operation. `folder` takes a timeline,
// `kernels` is the library for ranks whose tensors are a device's; empty: there are none.
void drive_engines(const std::string& folder, const std::string& kernels);
