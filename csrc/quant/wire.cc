#include "quant/wire.h"

#include <cstring>
#include <string>

#include "common/clones.h"
#include "common/error.h"

namespace qsgd {
namespace {

constexpr uint32_t kMagic = 0x44475351u;  // "QSGD"
constexpr uint8_t kVersion = 1;
constexpr int kStripes = 16;
constexpr uint32_t kMultiplier = 0x9E3779B1u;

QSGD_INLINE uint32_t stir(uint32_t hash, uint32_t word) {
  hash = (hash ^ word) * kMultiplier;  // odd multiplier and xor-shift: each step is a bijection
  return hash ^ (hash >> 15);
}

}  // namespace

QSGD_CLONES
uint64_t checksum(const uint8_t* bytes, size_t size) {
  uint32_t lane[kStripes];
  for (int i = 0; i < kStripes; ++i) lane[i] = static_cast<uint32_t>(i + 1);
  for (size_t at = 0; at < size; at += sizeof lane) {
    uint32_t word[kStripes];
    if (size - at >= sizeof word) {
      std::memcpy(word, bytes + at, sizeof word);
    } else {
      std::memset(word, 0, sizeof word);
      std::memcpy(word, bytes + at, size - at);
    }
    for (int i = 0; i < kStripes; ++i) lane[i] = stir(lane[i], word[i]);
  }
  uint32_t low = static_cast<uint32_t>(size), high = static_cast<uint32_t>(size >> 32);
  for (int i = 0; i < kStripes; ++i) {
    low = stir(low, lane[i]);
    high = stir(high + low, lane[kStripes - 1 - i]);
  }
  return uint64_t{high} << 32 | low;
}

void seal(uint8_t* message, size_t size, const QuantSpec& spec, size_t pieces, size_t count) {
  WireHeader h{};
  h.magic = kMagic;
  h.version = kVersion;
  h.bits = static_cast<uint8_t>(spec.bits);
  h.norm = static_cast<uint8_t>(spec.norm);
  h.bucket = spec.bucket;
  h.pieces = static_cast<uint32_t>(pieces);
  h.count = count;
  h.checksum = checksum(message + sizeof h, size - sizeof h);
  std::memcpy(message, &h, sizeof h);
}

void verify(const uint8_t* message, size_t size, const QuantSpec& spec, size_t pieces, size_t count,
            int sender) {
  const auto refuse = [&](const std::string& why) {
    throw internal_error("codes from rank " + std::to_string(sender) + " refused: " + why +
                         ". Every rank must run the same version of qsgd-hpc with the same "
                         "settings; if it does, suspect the network or memory of that host.");
  };
  if (size < sizeof(WireHeader)) refuse("only " + std::to_string(size) + " bytes");
  WireHeader h;
  std::memcpy(&h, message, sizeof h);
  const auto expect = [&](const char* what, uint64_t got, uint64_t wanted) {
    if (got != wanted) {
      refuse(std::string(what) + " is " + std::to_string(got) + ", expected " +
             std::to_string(wanted));
    }
  };
  expect("magic number", h.magic, kMagic);
  expect("format version", h.version, kVersion);
  expect("bits", h.bits, static_cast<uint64_t>(spec.bits));
  expect("reserved byte", h.reserved, 0);
  expect("norm", h.norm, static_cast<uint64_t>(spec.norm));
  expect("bucket size", h.bucket, spec.bucket);
  expect("number of tensors", h.pieces, pieces);
  expect("number of elements", h.count, count);
  if (h.checksum != checksum(message + sizeof h, size - sizeof h)) refuse("the checksum is wrong");
}

}  // namespace qsgd
