// Whether what the ranks submit under one name is one operation.
#pragma once

#include <string>

#include "engine/submission.h"

namespace qsgd {

// For messages: three digits are enough of an error.
std::string format_nmse(double nmse);

// Empty when the two can be one operation; else what differs, with both values and the remedy.
std::string difference(int rank_a, const Submission& a, int rank_b, const Submission& b);

// True when both can travel in one fused reduction.
bool fusable(const Submission& a, const Submission& b);

}  // namespace qsgd
