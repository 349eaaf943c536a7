// The k elements with the largest magnitudes of a bucket, not quantised: their 16-bit places in
// ascending order, then their float32 values. A last, shorter bucket keeps min(k, its size).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "common/clones.h"
#include "quant/code.h"

namespace qsgd {
namespace {

// Columns per kept element. More of them leave fewer candidates, but take more comparisons.
constexpr size_t kColumnsEach = 4;
constexpr size_t kFewestColumns = 32;  // two vectors of 16

// Smallest for the largest magnitude, and among equal ones for the first place. No two are equal,
// so the choice does not depend on the search algorithm.
uint64_t rank_of(float x, size_t place) { return uint64_t{~magnitude_bits(x)} << 32 | place; }
uint16_t place_of(uint64_t rank) { return static_cast<uint16_t>(rank); }

size_t kept(size_t count, const CodecSpec& spec) { return std::min<size_t>(count, spec.k); }

// The largest magnitude of each column of a bucket arranged in rows of `columns`.
QSGD_CLONES
void column_maxima(const float* x, size_t count, size_t columns, uint32_t* maxima) {
  std::fill_n(maxima, columns, 0u);
  size_t at = 0;
  for (; at + columns <= count; at += columns) {
    for (size_t c = 0; c < columns; ++c) maxima[c] = std::max(maxima[c], magnitude_bits(x[at + c]));
  }
  for (size_t c = 0; at + c < count; ++c)
    maxima[c] = std::max(maxima[c], magnitude_bits(x[at + c]));
}

class TopK final : public BucketCode {
 public:
  // Its bits are those of a kept element.
  constexpr TopK() : BucketCode({"topk", 32, 32, 0, kKeeps | kBiased, 1}) {}

  size_t code_bytes(const CodecSpec& spec, size_t count) const override {
    const size_t rest = count % spec.bucket;
    return (count / spec.bucket * spec.k + kept(rest, spec)) * (sizeof(uint16_t) + sizeof(float));
  }

 private:
  // Of equal magnitudes the first are kept; NaN counts as the largest, so that it is detected.
  bool encode_bucket(const float* x, size_t count, uint64_t /*first*/, const CodecSpec& spec,
                     const NoiseKey& /*key*/, float* /*scales*/, uint8_t* codes,
                     Scratch& scratch) const override {
    const size_t keep = kept(count, spec);
    std::vector<uint64_t>& ranks = scratch.ranks;
    find_candidates(x, count, keep, scratch);
    const auto end = ranks.begin() + static_cast<std::ptrdiff_t>(keep);
    if (end != ranks.end()) std::nth_element(ranks.begin(), end, ranks.end());
    std::sort(ranks.begin(), end, [](uint64_t a, uint64_t b) { return place_of(a) < place_of(b); });
    bool finite = true;
    for (size_t i = 0; i < keep; ++i) {
      const uint16_t place = place_of(ranks[i]);
      std::memcpy(codes + i * sizeof place, &place, sizeof place);
      std::memcpy(codes + keep * sizeof place + i * sizeof(float), &x[place], sizeof(float));
      finite &= std::isfinite(x[place]);
    }
    return finite;
  }

  // Sets scratch.ranks to those of the `keep` largest elements, and of few others.
  static void find_candidates(const float* x, size_t count, size_t keep, Scratch& scratch) {
    std::vector<uint64_t>& ranks = scratch.ranks;
    ranks.clear();
    size_t columns = kFewestColumns;
    while (columns < kColumnsEach * keep) columns *= 2;
    if (2 * columns > count) return add_ranks(x, 0, count, 1, 0, ranks);
    scratch.maxima.resize(2 * columns);
    uint32_t* const maxima = scratch.maxima.data();
    uint32_t* const sorted = maxima + columns;
    column_maxima(x, count, columns, maxima);
    // At least `keep` columns have a maximum of at least `least`, and so have the elements to keep.
    std::copy_n(maxima, columns, sorted);
    std::nth_element(sorted, sorted + keep - 1, sorted + columns, std::greater<>());
    const uint32_t least = sorted[keep - 1];
    if (least == 0 && *std::max_element(maxima, maxima + columns) == 0) {  // keep the first
      return add_ranks(x, 0, keep, 1, 0, ranks);
    }
    for (size_t c = 0; c < columns; ++c) {
      if (maxima[c] >= least) add_ranks(x, c, count, columns, least, ranks);
    }
  }

  // Adds the ranks of every `step`th element from `begin` to `end` with a magnitude of at least
  // `least`.
  static void add_ranks(const float* x, size_t begin, size_t end, size_t step, uint32_t least,
                        std::vector<uint64_t>& ranks) {
    for (size_t i = begin; i < end; i += step) {
      if (magnitude_bits(x[i]) >= least) ranks.push_back(rank_of(x[i], i));
    }
  }

  // Calls use(place, value) for each kept element. Ignores places that are not ascending or are
  // outside the bucket, which no encoder writes.
  template <class Use>
  static void each_kept(const uint8_t* codes, size_t count, const CodecSpec& spec, const Use& use) {
    const size_t keep = kept(count, spec);
    const uint8_t* const values = codes + keep * sizeof(uint16_t);
    size_t next = 0;
    for (size_t i = 0; i < keep; ++i) {
      uint16_t place;
      float value;
      std::memcpy(&place, codes + i * sizeof place, sizeof place);
      std::memcpy(&value, values + i * sizeof value, sizeof value);
      if (place < next || place >= count) continue;
      next = size_t{place} + 1;
      use(place, value);
    }
  }

  bool decode_bucket(const float* /*scales*/, const uint8_t* codes, size_t count,
                     const CodecSpec& spec, float* out, Scratch& /*scratch*/) const override {
    std::fill(out, out + count, 0.0f);
    bool finite = true;
    each_kept(codes, count, spec, [&](size_t place, float value) {
      out[place] = value;
      finite &= std::isfinite(value);
    });
    return finite;
  }

  void add_bucket(const float* /*scales*/, const uint8_t* codes, size_t count,
                  const CodecSpec& spec, float* sum, Scratch& /*scratch*/) const override {
    each_kept(codes, count, spec, [&](size_t place, float value) { sum[place] += value; });
  }
};

}  // namespace

const Code& topk_code() {
  static constexpr TopK code;
  return code;
}

}  // namespace qsgd
