// The errors of the core. Python turns each kind into the class of qsgd_hpc.errors of that name.
#pragma once

#include <stdexcept>
#include <string>

namespace qsgd {

// What a failed operation means for the caller; crosses threads inside a handle.
enum class ErrorKind { kNone, kUsage, kInternal, kRankFailed, kNonFinite };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

inline Error usage_error(const std::string& what) { return {ErrorKind::kUsage, what}; }
inline Error internal_error(const std::string& what) { return {ErrorKind::kInternal, what}; }

}  // namespace qsgd
