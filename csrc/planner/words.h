// Formatting of numbers for messages.
#pragma once

#include <string>

namespace qsgd {

std::string time_text(double seconds);  // "1.25 ms"
std::string size_text(double bytes);    // "512 KiB"

}  // namespace qsgd
