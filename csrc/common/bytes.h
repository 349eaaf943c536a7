// Little messages: fixed-width numbers and length-prefixed text, in host byte order.
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
  Writer() { bytes_.reserve(kMostMessages); }
  template <class T>
  void put(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    const auto* bytes = reinterpret_cast<const char*>(&value);
    bytes_.insert(bytes_.end(), bytes, bytes + sizeof value);
  }
  void put(const std::string& text) {
    put(static_cast<uint32_t>(text.size()));
    bytes_.insert(bytes_.end(), text.begin(), text.end());
  }
  void append(const std::vector<char>& bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  static constexpr size_t kMostMessages = 192;  // are no longer

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
