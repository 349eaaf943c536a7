// Memory to which MPI may still write.
#pragma once

#include <exception>
#include <utility>

namespace qsgd {

// Owns a value and frees it at the end of the scope, unless an exception ends the scope: an aborted
// collective leaves receives that cannot be cancelled, so their memory must remain. The job is
// about to end then.
template <class T>
class KeptOnFailure {
 public:
  explicit KeptOnFailure(T value = T()) : value_(new T(std::move(value))) {}
  ~KeptOnFailure() {
    if (std::uncaught_exceptions() == exceptions_) delete value_;
  }
  KeptOnFailure(const KeptOnFailure&) = delete;
  KeptOnFailure& operator=(const KeptOnFailure&) = delete;

  T& operator*() const { return *value_; }
  T* operator->() const { return value_; }

 private:
  T* const value_;
  const int exceptions_ = std::uncaught_exceptions();
};

}  // namespace qsgd
