// Lists of numbers in messages.
#pragma once

#include <string>

namespace qsgd {

// "0, 3, 7"
template <class Numbers>
std::string listed(const Numbers& numbers) {
  std::string list;
  for (const auto number : numbers) list += (list.empty() ? "" : ", ") + std::to_string(number);
  return list;
}

}  // namespace qsgd
