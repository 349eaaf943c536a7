// Errors of the core. Python raises the class in qsgd_hpc.errors for each kind.
#pragma once

#include <stdexcept>
#include <string>

namespace qsgd {

enum class ErrorKind { kNone, kUsage, kInternal, kRankFailed, kNonFinite };

// An error, or none, as a value: for what crosses threads and ranks before it is thrown.
struct Fault {
  ErrorKind kind = ErrorKind::kNone;
  std::string message;
  explicit operator bool() const { return kind != ErrorKind::kNone; }
};

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
