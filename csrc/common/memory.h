// Memory for results allocated by the core, whose size depends on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace qsgd {

// Uninitialised bytes aligned to 64, as frameworks expect for tensors.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t size_bytes)
      : bytes_(static_cast<char*>(std::aligned_alloc(kAlignment, rounded(size_bytes))), std::free),
        size_(size_bytes) {
    if (bytes_ == nullptr) throw std::bad_alloc();
  }
  // At least as many bytes, allocated elsewhere.
  Memory(const std::shared_ptr<uint8_t>& bytes, size_t size_bytes)
      : bytes_(std::reinterpret_pointer_cast<char>(bytes)), size_(size_bytes) {}
  char* data() const { return bytes_.get(); }
  size_t size() const { return size_; }

 private:
  static constexpr size_t kAlignment = 64;
  static size_t rounded(size_t size) { return (size / kAlignment + 1) * kAlignment; }

  std::shared_ptr<char> bytes_;
  size_t size_ = 0;
};

}  // namespace qsgd
