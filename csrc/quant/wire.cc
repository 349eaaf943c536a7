#include "quant/wire.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "common/error.h"
#include "quant/kernels.h"
#include "quant/philox.h"

namespace qsgd {
namespace {

constexpr uint32_t kMagic = 0x44475351u;  // "QSGD"
constexpr uint8_t kVersion = 2;

HashLanes begin_hash() {
  HashLanes lanes;
  for (uint32_t i = 0; i < std::size(lanes.word); ++i) lanes.word[i] = (i + 1) * 0x85EBCA6Bu;
  return lanes;
}

// Each step is a bijection of the state and, for a given state, of the word.
uint32_t absorb(uint32_t state, uint32_t word) {
  const uint32_t product = (state ^ word) * kMix;
  return product ^ (product >> 15);
}

// Mixes the lanes into 16, and these by halves into two.
uint64_t end_hash(HashLanes& lanes) {
  uint32_t* const lane = lanes.word;
  for (size_t i = 16; i < std::size(lanes.word); ++i) lane[i % 16] = absorb(lane[i % 16], lane[i]);
  for (int half = 8; half >= 2; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = absorb(lane[i], lane[i + half]);
  }
  return uint64_t{lane[0]} << 32 | lane[1];
}

// A change of one block's hash changes its term; the terms are added in any order.
uint64_t term_of(uint64_t hash, uint64_t index) {
  return split_mix(hash + index * 0x9E3779B97F4A7C15u);
}

}  // namespace

uint64_t checksum_term(const uint8_t* block, size_t size, uint64_t index) {
  HashLanes lanes = begin_hash();
  const size_t whole = size / kHashRow * kHashRow;
  kernels().hash_take(lanes, block, whole / kHashRow);
  if (whole < size) {
    uint8_t rest[kHashRow] = {};
    std::memcpy(rest, block + whole, size - whole);
    kernels().hash_take(lanes, rest, 1);
  }
  return term_of(end_hash(lanes), index);
}

BlockHash::BlockHash(const uint8_t* body, size_t begin)
    : body_(body), at_((begin + kHashBlock - 1) / kHashBlock * kHashBlock), lanes_(begin_hash()) {}

void BlockHash::reach(size_t end) {
  while (at_ < end) {
    const size_t block_end = (at_ / kHashBlock + 1) * kHashBlock;
    const size_t rows = (std::min(end, block_end) - at_) / kHashRow;
    if (rows == 0) return;
    kernels().hash_take(lanes_, body_ + at_, rows);
    at_ += rows * kHashRow;
    if (at_ < block_end) return;
    sum_ += term_of(end_hash(lanes_), at_ / kHashBlock - 1);
    lanes_ = begin_hash();
  }
}

uint64_t checksum_of_nothing(size_t size) { return split_mix(size); }

uint64_t checksum(const uint8_t* bytes, size_t size) {
  uint64_t sum = checksum_of_nothing(size);
  for (size_t at = 0; at < size; at += kHashBlock) {
    sum += checksum_term(bytes + at, std::min(kHashBlock, size - at), at / kHashBlock);
  }
  return sum;
}

void seal(uint8_t* message, size_t size, const CodecSpec& spec, size_t count) {
  const size_t body = size - sizeof(WireHeader);
  write_header(message, spec, count, checksum(message + sizeof(WireHeader), body));
}

void write_header(uint8_t* message, const CodecSpec& spec, size_t count, uint64_t checksum) {
  WireHeader h{};
  h.magic = kMagic;
  h.version = kVersion;
  h.scheme = static_cast<uint8_t>(spec.scheme);
  h.bits = static_cast<uint8_t>(spec.bits);
  h.norm = static_cast<uint8_t>(spec.norm);
  h.bucket = spec.bucket;
  h.k = spec.k;
  h.count = count;
  h.checksum = checksum;
  std::memcpy(message, &h, sizeof h);
}

void refuse(const std::string& why, int sender) {
  throw internal_error("codes from rank " + std::to_string(sender) + " refused: " + why +
                       ". Every rank must run the same version of qsgd-hpc with the same "
                       "settings; if it does, suspect the network or memory of that host.");
}

namespace {

void expect(const char* what, uint64_t got, uint64_t wanted, int sender) {
  if (got == wanted) return;
  refuse(std::string(what) + " is " + std::to_string(got) + ", expected " + std::to_string(wanted),
         sender);
}

}  // namespace

uint64_t verify_header(const uint8_t* message, size_t size, const CodecSpec& spec, size_t count,
                       int sender) {
  if (size < sizeof(WireHeader)) refuse("only " + std::to_string(size) + " bytes", sender);
  WireHeader h;
  std::memcpy(&h, message, sizeof h);
  expect("magic number", h.magic, kMagic, sender);
  expect("format version", h.version, kVersion, sender);
  expect("scheme", h.scheme, static_cast<uint64_t>(spec.scheme), sender);
  expect("bits", h.bits, static_cast<uint64_t>(spec.bits), sender);
  expect("norm", h.norm, static_cast<uint64_t>(spec.norm), sender);
  expect("bucket size", h.bucket, spec.bucket, sender);
  expect("kept elements", h.k, spec.k, sender);
  expect("number of elements", h.count, count, sender);
  return h.checksum;
}

void verify_checksum(uint64_t got, uint64_t wanted, int sender) {
  if (got != wanted) refuse("the checksum is wrong", sender);
}

void verify(const uint8_t* message, size_t size, const CodecSpec& spec, size_t count, int sender) {
  const uint64_t wanted = verify_header(message, size, spec, count, sender);
  const size_t body = size - sizeof(WireHeader);
  verify_checksum(checksum(message + sizeof(WireHeader), body), wanted, sender);
}

}  // namespace qsgd
