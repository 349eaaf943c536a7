// Codes and decodes the same data with every instruction set that this machine has, and prints a
// digest of the bytes of each case: one line per set and case, for the test to compare.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "quant/codec.h"
#include "quant/kernels.h"
#include "quant/message.h"
#include "quant/wire.h"

namespace {

using namespace qsgd;

constexpr NoiseKey kKey{(uint64_t{7} << 32) + 5, 9, 11, 3, Phase::kScatter, Generator::kArs};
constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};

// Buckets of ordinary norms, with all that is not ordinary among them. Integers make them, so that
// they are the same whatever computes them.
std::vector<float> elements(size_t count) {
  constexpr float kUnusual[] = {0.0f, 1e-45f, 3e-39f, 6e-8f, 65504.0f, 65520.0f, 3.4e38f, 1e30f};
  std::mt19937 random(5);
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) {
    const float unit = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f;
    const size_t bucket = i / 64;
    x[i] = bucket % 5 == 4 ? unit * kUnusual[bucket / 5 % 8] : unit;
  }
  if (count > 700) x[700] = -INFINITY;
  return x;
}

std::vector<uint8_t> as_type(const std::vector<float>& x, DType dtype) {
  std::vector<uint8_t> out(x.size() * facts(dtype).size);
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (size_t i = 0; i < x.size(); ++i) {
      const T value(x[i]);
      std::memcpy(out.data() + i * sizeof value, &value, sizeof value);
    }
  });
  return out;
}

// FNV-1a: none of the code that is under test.
uint64_t digest(const std::vector<uint8_t>& bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

void show(const char* set, const CodecSpec& spec, DType dtype, size_t count) {
  const std::vector<uint8_t> x = as_type(elements(count), dtype);
  std::vector<uint8_t> message(message_bytes(count, spec)), y(x.size());
  Workers workers(1);
  const bool finite = encode_message(x.data(), dtype, count, spec, kKey, message.data(), workers);
  decode_message(message.data(), message.size(), count, spec, y.data(), dtype, false, workers);
  std::vector<uint8_t> sum = as_type(elements(count), DType::kFloat32);
  decode_message(message.data(), message.size(), count, spec, sum.data(), DType::kFloat32, true,
                 workers);
  std::printf("%s %s/%s/%zu %d %016" PRIx64 " %016" PRIx64 " %016" PRIx64 "\n", set,
              describe(spec).c_str(), facts(dtype).name, count, finite, digest(message), digest(y),
              digest(sum));
}

void show_all(const char* set) {
  for (const size_t count : {1, 64, 65, 513, 8192, 20011}) {
    for (const DType dtype : kTypes) {
      for (int bits = 2; bits <= 8; ++bits) {
        for (const uint32_t bucket : {64u, 512u, 4096u}) {
          CodecSpec spec;
          spec.bits = bits;
          spec.bucket = bucket;
          show(set, spec, dtype, count);
        }
        CodecSpec spec;
        spec.bits = bits;
        spec.norm = Norm::kL2;
        show(set, spec, dtype, count);
        spec.contract = true;
        show(set, spec, dtype, count);
        spec = CodecSpec{};
        spec.bits = bits;
        spec.rounding = Rounding::kNearest;
        show(set, spec, dtype, count);
      }
      for (int bits = 1; bits <= 8; ++bits) {
        for (const uint32_t bucket : {64u, 512u, 4096u}) {
          CodecSpec spec;
          spec.scheme = Scheme::kEden;
          spec.bits = bits;
          spec.bucket = bucket;
          show(set, spec, dtype, count);
        }
      }
      for (const Scheme scheme : {Scheme::kFloat16, Scheme::kBFloat16}) {
        CodecSpec spec;
        spec.scheme = scheme;
        show(set, spec, dtype, count);
      }
    }
  }
}

}  // namespace

int main() {
  for (const std::string& set : instruction_sets()) {
    use_instruction_set(set);
    show_all(set.c_str());
  }
}
