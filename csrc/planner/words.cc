#include "planner/words.h"

#include <cstdio>

namespace qsgd {
namespace {

std::string number(double value, const char* unit) {
  char text[48];
  const int digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  std::snprintf(text, sizeof text, "%.*f %s", digits, value, unit);
  return text;
}

}  // namespace

std::string time_text(double seconds) {
  if (seconds < 1e-3) return number(seconds * 1e6, "us");
  return seconds < 1 ? number(seconds * 1e3, "ms") : number(seconds, "s");
}

std::string size_text(double bytes) {
  if (bytes < 1024) return number(bytes, "B");
  return bytes < 1024 * 1024 ? number(bytes / 1024, "KiB") : number(bytes / 1024 / 1024, "MiB");
}

}  // namespace qsgd
