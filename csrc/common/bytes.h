// Small messages: fixed-width numbers and length-prefixed text, in host byte order.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "common/error.h"

namespace qsgd {

class Writer {
 public:
  template <class T>
  void put(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put(const std::string& text) {
    put(static_cast<uint32_t>(text.size()));
    append(text.data(), text.size());
  }
  void append(const std::vector<char>& bytes) { append(bytes.data(), bytes.size()); }
  void append(const char* bytes, size_t size) {
    if (size > 0 && bytes_.capacity() == 0) bytes_.reserve(kMostMessages);
    bytes_.insert(bytes_.end(), bytes, bytes + size);
  }
  const std::vector<char>& bytes() const { return bytes_; }
  bool empty() const { return bytes_.empty(); }
  // Keeps the memory for later writes.
  void clear() { bytes_.clear(); }

 private:
  static constexpr size_t kMostMessages = 192;  // typical maximum size

  std::vector<char> bytes_;
};

class Reader {
 public:
  Reader(const char* data, size_t size) : at_(data), end_(data + size) {}
  template <class T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string text() {
    const auto size = get<uint32_t>();
    return std::string(take(size), size);
  }
  bool done() const { return at_ == end_; }
  const char* at() const { return at_; }

 private:
  const char* take(size_t size) {
    if (static_cast<size_t>(end_ - at_) < size) throw internal_error("control message cut short");
    const char* from = at_;
    at_ += size;
    return from;
  }
  const char* at_;
  const char* const end_;
};

}  // namespace qsgd
