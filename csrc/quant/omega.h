// Bit streams, highest bit first, and Elias's omega code for positive integers: its length grows
// like log2(n), and 1 takes one bit. Elias, Universal codeword sets, IEEE Trans. Inf. Theory 21(2),
// 1975.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/clones.h"
#include "common/error.h"

namespace qsgd {

// The codeword is the lowest `length` bits of `bits`.
struct Codeword {
  uint64_t bits;
  int length;
};

// The binary digits of n, preceded by those of (their number - 1), and so on down to 1; finally a
// 0.
inline Codeword omega(uint32_t n) {
  Codeword word{0, 1};
  while (n > 1) {
    int digits = 0;
    for (uint32_t rest = n; rest != 0; rest >>= 1) ++digits;
    word.bits |= uint64_t{n} << word.length;
    word.length += digits;
    n = static_cast<uint32_t>(digits - 1);
  }
  return word;
}

// Always inlined, like the reader below, so that its state stays in registers with any compiler.
class BitWriter {
 public:
  explicit BitWriter(std::vector<uint8_t>& out) : out_(out) {}

  QSGD_INLINE void put(uint64_t bits, int length) {  // length <= 56
    pending_ = pending_ << length | bits;
    waiting_ += length;
    for (; waiting_ >= 8; waiting_ -= 8) {
      out_.push_back(static_cast<uint8_t>(pending_ >> (waiting_ - 8)));
    }
  }
  QSGD_INLINE void put_omega(uint32_t n) {
    const Codeword word = n < kShort ? short_words()[n] : omega(n);
    put(word.bits, word.length);
  }
  // Pads the last byte with zeros.
  void finish() { put(0, (8 - waiting_) % 8); }

 private:
  static constexpr uint32_t kShort = 64;
  using Words = std::array<Codeword, kShort>;
  static const Words& short_words() {
    static const Words words = [] {
      Words made{};
      for (uint32_t n = 1; n < kShort; ++n) made[n] = omega(n);
      return made;
    }();
    return words;
  }

  std::vector<uint8_t>& out_;
  uint64_t pending_ = 0;
  int waiting_ = 0;  // bits of pending_ that are not written yet, below 8 between calls
};

// Throws at the end of the bytes, and for codes that no writer writes.
class BitReader {
 public:
  BitReader(const uint8_t* bytes, size_t size) : bytes_(bytes), size_(size) {}

  QSGD_INLINE uint64_t get(int length) {  // length <= 56
    while (waiting_ < length) {
      if (at_ == size_) throw internal_error("the codes are cut short");
      pending_ = pending_ << 8 | bytes_[at_++];
      waiting_ += 8;
    }
    waiting_ -= length;
    return pending_ >> waiting_ & ((uint64_t{1} << length) - 1);
  }
  QSGD_INLINE uint32_t get_omega() {
    uint32_t n = 1;
    while (get(1) == 1) {
      if (n > 31) throw internal_error("a number is beyond 32 bits");
      n = static_cast<uint32_t>(uint64_t{1} << n | get(static_cast<int>(n)));
    }
    return n;
  }

 private:
  const uint8_t* const bytes_;
  const size_t size_;
  size_t at_ = 0;
  uint64_t pending_ = 0;
  int waiting_ = 0;  // bits of pending_ that are not read yet, below 8 between calls
};

}  // namespace qsgd
