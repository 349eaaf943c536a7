// Memory for results allocated by the core, whose size depends on all ranks.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace qsgd {

// Uninitialised bytes aligned to 64, as frameworks expect for tensors.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t size_bytes)
      : bytes_(static_cast<char*>(std::aligned_alloc(kAlignment, rounded(size_bytes)))),
        size_(size_bytes) {
    if (bytes_ == nullptr) throw std::bad_alloc();
  }
  char* data() const { return bytes_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(char* bytes) const { std::free(bytes); }
  };
  static constexpr size_t kAlignment = 64;
  static size_t rounded(size_t size) { return (size / kAlignment + 1) * kAlignment; }

  std::unique_ptr<char[], Free> bytes_;
  size_t size_ = 0;
};

}  // namespace qsgd
