// The wire format: header, then the scales of all pieces of tensors in the message, then their
// codes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "quant/codec.h"
#include "quant/kernels.h"

namespace qsgd {

struct WireHeader {
  uint32_t magic;
  uint8_t version;
  uint8_t scheme;
  uint8_t bits;
  uint8_t norm;
  uint32_t bucket;
  uint32_t k;
  uint64_t count;     // elements
  uint64_t checksum;  // of everything after the header
};
static_assert(sizeof(WireHeader) == 32);

// Hash of `size` bytes: any flipped bit changes it. Not cryptographic. It is the sum, in any order,
// of checksum_of_nothing(size) and of one term for each block of kHashBlock bytes, the last of
// which may be shorter.
constexpr size_t kHashBlock = 1 << 14;
uint64_t checksum(const uint8_t* bytes, size_t size);
uint64_t checksum_of_nothing(size_t size);
uint64_t checksum_term(const uint8_t* block, size_t size, uint64_t index);

// Hash of consecutive complete blocks as they are written or read, while they are in the caches.
class BlockHash {
 public:
  // `begin` is rounded up to the next block.
  BlockHash(const uint8_t* body, size_t begin);

  // Hashes all bytes up to `end`, or slightly fewer; at the end of a block, all of them.
  void reach(size_t end);
  // Sum of the terms of the completed blocks.
  uint64_t sum() const { return sum_; }

 private:
  const uint8_t* const body_;
  size_t at_;  // everything before is in the lanes or in the sum
  HashLanes lanes_;
  uint64_t sum_ = 0;
};

// Writes the header of a complete body.
void seal(uint8_t* message, size_t size, const CodecSpec& spec, size_t count);

// The same with a known checksum.
void write_header(uint8_t* message, const CodecSpec& spec, size_t count, uint64_t checksum);

// Throws the error of a message that cannot be decoded, with the remedy. `sender`: its rank.
[[noreturn]] void refuse(const std::string& why, int sender);

// Throws an error with the difference if `message` is not what this rank expects. `sender`: its
// rank, for the error.
void verify(const uint8_t* message, size_t size, const CodecSpec& spec, size_t count, int sender);

// The two parts of verify(), for callers that compute the checksum: the first returns the expected
// one.
uint64_t verify_header(const uint8_t* message, size_t size, const CodecSpec& spec, size_t count,
                       int sender);
void verify_checksum(uint64_t got, uint64_t wanted, int sender);

}  // namespace qsgd
