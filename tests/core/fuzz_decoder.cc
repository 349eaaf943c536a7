// Feeds hostile bytes to every decoder, for the sanitizers to watch:
//     fuzz_decoder SECONDS [SEED]
// Most messages are valid ones that were then damaged, and most of those get a right checksum
// again, so that the damage reaches the decoders. Buffers have the exact size, so that one byte
// beyond them is seen. Prints what it did; the same seed makes the same messages.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/workers.h"
#include "quant/code.h"
#include "quant/message.h"
#include "quant/wire.h"

using namespace qsgd;

namespace {

using Message = std::vector<uint8_t>;

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : random_(seed) {}

  void once() {
    const CodecSpec s = spec();
    try {
      check(s);
    } catch (const Error&) {
      return;
    }
    const size_t n = count();
    const std::vector<float> x = gradient(n);
    Wire w{s, n, sizeof(WireHeader) + s.scales(n) * sizeof(float), false,
           Message(sizeof(WireHeader) + s.bytes(n))};
    uint8_t* const out = w.message.data();
    w.finite = encode(x.data(), DType::kFloat32, n, 0, s, key(),
                      reinterpret_cast<float*>(out + sizeof(WireHeader)), out + w.codes_at);
    seal(out, w.message.size(), s, n);
    require(try_wire(w, w.message), describe(s) + ": a whole message was refused");
    check_whole(w);
    for (int variant = 0; variant < kVariants; ++variant) {
      Message message = w.message;
      damage(message);
      if (message.size() >= sizeof(WireHeader) && !one_in(10)) {
        seal(message.data(), message.size(), s, n);
      }
      if (one_in(10)) damage(message);
      try_wire(w, message);
    }
  }

  void report(uint64_t seed) const {
    std::printf("%llu messages, %llu decoded, %llu refused, seed %llu: ok\n", wide(messages_),
                wide(decoded_), wide(messages_ - decoded_), wide(seed));
  }

 private:
  static unsigned long long wide(uint64_t x) { return x; }

  uint64_t below(uint64_t end) { return random_() % end; }
  bool one_in(uint64_t n) { return below(n) == 0; }

  static void require(bool holds, const std::string& what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what.c_str());
    std::abort();
  }

  // Any settings at all, mostly allowed ones.
  CodecSpec spec() {
    CodecSpec s;
    s.scheme = static_cast<Scheme>(below(code_names().size()));
    const CodeTraits& traits = traits_of(s.scheme);
    s.bits = !traits.has_choice() && !one_in(8) ? traits.most_bits : static_cast<int>(below(10));
    s.norm = one_in(2) ? Norm::kMax : Norm::kL2;
    s.rounding = one_in(4) ? Rounding::kNearest : Rounding::kStochastic;
    s.bucket = one_in(200) ? kMaxBucket : static_cast<uint32_t>(64 * (1 + below(9)));
    if (traits.has(kRotates) && !one_in(8)) s.bucket = 64u << below(6);
    if (one_in(30)) s.bucket = static_cast<uint32_t>(random_());
    s.k = s.scheme == Scheme::kTopK ? static_cast<uint32_t>(below(70)) : 0;
    s.contract = one_in(3);
    return s;
  }

  size_t count() {
    static constexpr std::array<size_t, 10> kEdges = {0, 1, 63, 64, 65, 511, 512, 513, 1000, 1300};
    return one_in(500) ? kMaxBucket + below(100) : kEdges[below(kEdges.size())];
  }

  std::vector<float> gradient(size_t count) {
    std::vector<float> x(count);
    std::normal_distribution<float> normal;
    const bool wild = one_in(4), infinite = one_in(8);
    for (float& v : x) {
      v = normal(random_);
      if (wild && one_in(4)) v = std::ldexp(v, static_cast<int>(below(270)) - 145);
      if (wild && one_in(4)) v = 0;
      if (infinite && one_in(100)) v = one_in(2) ? INFINITY : NAN;
    }
    return x;
  }

  NoiseKey key() {
    const auto word = [this] { return static_cast<uint32_t>(random_()); };
    return {random_(), word(), word(), word() >> 4, Phase::kScatter};
  }

  void damage(Message& message) {
    static constexpr std::array<uint8_t, 6> kBytes = {0, 1, 0x7f, 0x80, 0xfe, 0xff};
    for (uint64_t times = below(6); times-- > 0 && !message.empty();) {
      uint8_t& byte =
          message[below(one_in(2) ? message.size() : std::min<size_t>(64, message.size()))];
      byte =
          one_in(2) ? kBytes[below(kBytes.size())] : static_cast<uint8_t>(byte ^ (1u << below(8)));
    }
    if (one_in(10)) {
      for (uint8_t& byte : message) byte = static_cast<uint8_t>(random_());
    }
    if (one_in(10)) message.resize(below(message.size() + 50));
  }

  struct Wire {
    CodecSpec spec;
    size_t count;
    size_t codes_at;
    bool finite;
    Message message;
  };

  bool try_wire(const Wire& w, const Message& message) {
    ++messages_;
    // A receiver asks for exactly the bytes that it expects; ASan sees the end of this copy.
    const std::unique_ptr<uint8_t[]> bytes(new uint8_t[message.size()]);
    std::copy(message.begin(), message.end(), bytes.get());
    const bool accepted = try_whole(bytes.get(), message.size(), w);
    try {
      verify(bytes.get(), message.size(), w.spec, w.count, 1);
    } catch (const Error&) {
      require(!accepted, describe(w.spec) + ": decode_message took what verify refuses");
      return false;
    }
    if (message.size() != w.message.size()) {
      require(!accepted, describe(w.spec) + ": decode_message took a wrong length");
      return false;
    }
    require(accepted, describe(w.spec) + ": decode_message refused what verify takes");
    ++decoded_;
    decode_both(bytes.get(), w);
    return true;
  }

  // The decoder of whole messages, which checks and decodes in one pass on several threads.
  bool try_whole(const uint8_t* bytes, size_t size, const Wire& w) {
    const std::unique_ptr<float[]> out(new float[w.count]());
    try {
      decode_message(bytes, size, w.count, w.spec, out.get(), DType::kFloat32, one_in(2), workers_);
    } catch (const Error&) {
      return false;
    }
    return true;
  }

  // Returns whether all values are finite.
  static bool decode_both(const uint8_t* bytes, const Wire& w) {
    const auto* scales = reinterpret_cast<const float*>(bytes + sizeof(WireHeader));
    const uint8_t* const codes = bytes + w.codes_at;
    const std::unique_ptr<float[]> out(new float[w.count]), sum(new float[w.count]());
    const bool finite = decode(scales, codes, w.count, w.spec, out.get(), DType::kFloat32);
    decode_add(scales, codes, w.count, w.spec, sum.get());
    bool same = true;
    for (size_t i = 0; i < w.count; ++i) {
      same &= out[i] == sum[i] || (std::isnan(out[i]) && std::isnan(sum[i]));
    }
    require(same, describe(w.spec) + ": decode and decode_add differ");
    return finite;
  }

  static void check_whole(const Wire& w) {
    const bool finite = decode_both(w.message.data(), w);
    const bool cast = w.spec.scheme == Scheme::kFloat16 || w.spec.scheme == Scheme::kBFloat16;
    require(finite || !w.finite || cast, describe(w.spec) + ": finite elements became not finite");
    require(!finite || w.finite, describe(w.spec) + ": NaN or Inf was lost");
  }

  static constexpr int kVariants = 20;

  std::mt19937_64 random_;
  Workers workers_{2};
  uint64_t messages_ = 0;
  uint64_t decoded_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s SECONDS [SEED]\n", argv[0]);
    return 2;
  }
  const auto end = Clock::now() + std::chrono::duration<double>(std::atof(argv[1]));
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  Fuzzer fuzzer(seed);
  while (Clock::now() < end) fuzzer.once();
  fuzzer.report(seed);
}
