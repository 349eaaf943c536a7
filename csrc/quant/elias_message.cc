#include "quant/elias_message.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "quant/grid.h"
#include "quant/sparse_levels.h"

namespace qsgd {
namespace {

constexpr uint32_t kMagic = 0x4C455351u;  // "QSEL"
constexpr uint32_t kVersion = 1;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Header {
  uint32_t magic;
  uint32_t version;
  uint32_t checksum;  // of everything behind it
  uint32_t levels;
  uint64_t count;
  uint32_t bucket;
  uint32_t sparse;
};
static_assert(sizeof(Header) == 32);
constexpr size_t kHashed = offsetof(Header, levels);

// CRC-32 of zlib and Ethernet: what tools outside this project can check too.
uint32_t crc32(const uint8_t* bytes, size_t size) {
  static const std::array<uint32_t, 256> kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
      table[i] = i;
      for (int bit = 0; bit < 8; ++bit) {
        table[i] = table[i] >> 1 ^ (table[i] & 1u ? 0xEDB88320u : 0u);
      }
    }
    return table;
  }();
  uint32_t hash = ~0u;
  for (size_t i = 0; i < size; ++i) hash = hash >> 8 ^ kTable[(hash ^ bytes[i]) & 255u];
  return ~hash;
}

QSGD_CLONES
float norm_of(const float* x, size_t count) { return l2_norm(x, count); }

// The signed levels of a bucket whose norm is finite and not 0.
QSGD_CLONES
void quantize(const float* x, size_t count, uint64_t first, float norm, uint32_t levels,
              const NoiseKey& key, int32_t* to) {
  const double scale = levels / double{norm}, most = levels;
  for (size_t begin = 0; begin < count; begin += kTile) {
    uint16_t noise[kTile];
    qsgd::noise(key, (first + begin) / kTile, 1, noise);
    const size_t size = std::min<size_t>(kTile, count - begin);
    for (size_t i = 0; i < size; ++i) {
      const double u = (double{1} * noise[i] + 0.5) * 0x1p-16;
      const double ratio = std::fabs(double{x[begin + i]}) * scale;
      const double a = ratio < most ? ratio : most;
      const int floor = static_cast<int>(a);
      const int level = floor + (a - floor >= u ? 1 : 0);
      to[begin + i] = std::signbit(x[begin + i]) ? -level : level;
    }
  }
}

uint32_t magnitude(int32_t level) { return static_cast<uint32_t>(std::abs(level)); }

void put_dense(BitWriter& out, const std::vector<int32_t>& levels) {
  for (const int32_t level : levels) {
    out.put_omega(magnitude(level) + 1);
    if (level != 0) out.put(level < 0, 1);
  }
}

class Decoder {
 public:
  Decoder(BitReader& in, const Header& header) : in_(in), header_(header) {}

  void bucket(size_t count, float* out) {
    norm_ = bit_cast<float>(static_cast<uint32_t>(in_.get(32)));
    std::fill(out, out + count, std::isfinite(norm_) ? 0.0f : kNan);
    if (header_.sparse != 0) {
      get_sparse(in_, count,
                 [&](size_t i, uint32_t level, bool negative) { out[i] = value(level, negative); });
    } else {
      dense(count, out);
    }
  }

 private:
  void dense(size_t count, float* out) {
    for (size_t i = 0; i < count; ++i) {
      const uint32_t level = in_.get_omega() - 1;
      if (level != 0) out[i] = value(level, in_.get(1) != 0);
    }
  }

  float value(uint32_t level, bool negative) const {
    if (level > header_.levels) {
      throw internal_error("level " + std::to_string(level) + " of " +
                           std::to_string(header_.levels));
    }
    const double size = double{norm_} * level / header_.levels;
    return static_cast<float>(negative ? -size : size);
  }

  BitReader& in_;
  const Header& header_;
  float norm_ = 0;
};

Header read_header(const uint8_t* message, size_t size, size_t count) {
  if (size < sizeof(Header)) throw internal_error("only " + std::to_string(size) + " bytes");
  Header h;
  std::memcpy(&h, message, sizeof h);
  if (h.magic != kMagic) throw internal_error("the magic number is wrong");
  if (h.version != kVersion) {
    throw internal_error("format version " + std::to_string(h.version) + ", expected " +
                         std::to_string(kVersion));
  }
  if (h.checksum != crc32(message + kHashed, size - kHashed)) {
    throw internal_error("the checksum is wrong");
  }
  if (h.levels == 0 || h.bucket == 0 || h.sparse > 1) {
    throw internal_error("the header is damaged");
  }
  if (h.count != count) {
    throw internal_error("it holds " + std::to_string(h.count) + " elements, expected " +
                         std::to_string(count));
  }
  return h;
}

}  // namespace

void check(const EliasSpec& spec) {
  if (spec.levels == 0 || spec.levels > kMaxEliasLevels) {
    throw usage_error("levels=" + std::to_string(spec.levels) + ": choose 1 to " +
                      std::to_string(kMaxEliasLevels));
  }
  if (spec.bucket == 0 || spec.bucket % kTile != 0 || spec.bucket > kMaxEliasBucket) {
    throw usage_error("bucket_size=" + std::to_string(spec.bucket) + ": choose a multiple of " +
                      std::to_string(kTile) + " up to " + std::to_string(kMaxEliasBucket));
  }
}

std::vector<uint8_t> elias_encode(const float* x, size_t count, const EliasSpec& spec,
                                  const NoiseKey& key) {
  check(spec);
  std::vector<uint8_t> message(sizeof(Header));
  BitWriter out(message);
  std::vector<int32_t> levels;
  for (size_t begin = 0; begin < count; begin += spec.bucket) {
    const size_t size = std::min<size_t>(spec.bucket, count - begin);
    const float norm = norm_of(x + begin, size);
    levels.assign(size, 0);
    if (norm > 0) quantize(x + begin, size, begin, norm, spec.levels, key, levels.data());
    out.put(bit_cast<uint32_t>(norm), 32);
    if (spec.sparse) {
      put_sparse(out, size, [&](size_t i) { return levels[i]; });
    } else {
      put_dense(out, levels);
    }
  }
  out.finish();
  Header h{kMagic, kVersion, 0, spec.levels, count, spec.bucket, spec.sparse};
  std::memcpy(message.data(), &h, sizeof h);
  h.checksum = crc32(message.data() + kHashed, message.size() - kHashed);
  std::memcpy(message.data(), &h, sizeof h);
  return message;
}

void elias_decode(const uint8_t* message, size_t size, size_t count, float* out) {
  try {
    const Header header = read_header(message, size, count);
    BitReader in(message + sizeof header, size - sizeof header);
    Decoder decoder(in, header);
    for (size_t begin = 0; begin < count; begin += header.bucket) {
      decoder.bucket(std::min<size_t>(header.bucket, count - begin), out + begin);
    }
    if (!in.done()) throw internal_error("bytes are left over");
  } catch (const Error& error) {
    throw internal_error(std::string("Elias message refused: ") + error.what() +
                         ". It must come whole from elias_encode of this version of qsgd-hpc.");
  }
}

}  // namespace qsgd
