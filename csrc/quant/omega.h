// Bit streams, highest bit first; Elias's omega code for positive integers, whose length grows like
// log2(n), and 1 takes one bit (Elias, Universal codeword sets, IEEE Trans. Inf. Theory 21(2),
// 1975); and the sparse code of levels that uses it.
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

// The sparse code of a bucket's signed levels, most of which are 0. For each nonzero level:
// omega(distance from the previous one), its sign, and omega(level). A distance to the position
// after the bucket ends it. Alistarh et al., QSGD, NeurIPS 2017, section 3.2 and Theorem 3.2.
// level(i) is the level of element i.
template <class Level>
void put_sparse(BitWriter& out, size_t count, const Level& level) {
  size_t next = 0;  // the first element that is not coded
  for (size_t i = 0; i < count; ++i) {
    const int32_t value = level(i);
    if (value == 0) continue;
    out.put_omega(static_cast<uint32_t>(i + 1 - next));
    out.put(value < 0, 1);
    out.put_omega(static_cast<uint32_t>(value < 0 ? -value : value));
    next = i + 1;
  }
  if (next < count) out.put_omega(static_cast<uint32_t>(count + 1 - next));
}

// Calls set(i, level, negative) for the elements with nonzero levels. Throws for codes that
// put_sparse() does not write.
template <class Set>
void get_sparse(BitReader& in, size_t count, const Set& set) {
  for (size_t next = 0; next < count;) {
    const size_t gap = in.get_omega();
    if (gap > count - next + 1) throw internal_error("an element lies outside its bucket");
    if (gap == count - next + 1) return;
    next += gap;
    const bool negative = in.get(1) != 0;
    set(next - 1, in.get_omega(), negative);
  }
}

}  // namespace qsgd
