#include "quant/kernels.h"

#include <atomic>

#include "common/error.h"
#include "quant/philox.h"

namespace qsgd {
namespace {

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
  for (const Kernels* k : {avx512_kernels(), avx2_kernels(), neon_kernels(), scalar_kernels()}) {
    if (k) found.push_back(k);
  }
  return found;
}

// The only mutable state: the selected table; all give equal results.
std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> table{available().front()};
  return table;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* k : available()) names.push_back(k->name);
  return names;
}

void use_instruction_set(const std::string& name) {
  std::string known;
  for (const Kernels* k : available()) {
    if (name == k->name) {
      chosen().store(k, std::memory_order_relaxed);
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(k->name);
  }
  throw usage_error("instruction set '" + name + "': this machine has " + known);
}

void noise(const NoiseKey& key, uint64_t first_tile, size_t tiles, uint16_t* out) {
  if (key.generator == Generator::kArs) return kernels().noise(key, first_tile, tiles, out);
  const Philox philox(key);
  for (size_t t = 0; t < tiles; ++t, out += kTile) {
    for (int b = 0; b < kTileBlocks; ++b) {
      const PhiloxBlock block =
          philox.block((first_tile + t) * kTileBlocks + static_cast<uint64_t>(b));
      uint16_t* const to = out + b % 2 * 32 + b / 2 * 4;
      for (int c = 0; c < 4; ++c) {
        to[c] = static_cast<uint16_t>(block.word[c]);
        to[16 + c] = static_cast<uint16_t>(block.word[c] >> 16);
      }
    }
  }
}

}  // namespace qsgd
