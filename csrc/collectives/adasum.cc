#include "collectives/adasum.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "collectives/exchange.h"
#include "collectives/fold.h"
#include "collectives/schedule.h"
#include "common/dtype.h"
#include "common/error.h"
#include "common/kept.h"
#include "quant/convert.h"

namespace qsgd {
namespace {

// The arithmetic of Adasum on runs of elements.
struct Dots {
  double ab = 0;
  double aa = 0;
  double bb = 0;
  Dots& operator+=(const Dots& o) {
    ab += o.ab;
    aa += o.aa;
    bb += o.bb;
    return *this;
  }
};

// Factors of a and b in their Adasum. A zero vector has no effect.
struct Factors {
  double a;
  double b;
};
constexpr int kLanes = 8;  // a fixed number, so that every instruction set gives the same sums
constexpr size_t kPairs = 1024;

template <class T>
QSGD_INLINE Dots dots_loop(const T* a, const T* b, size_t count) {
  double ab[kLanes] = {}, aa[kLanes] = {}, bb[kLanes] = {};
  const auto add = [&](size_t i, int lane) {
    const double x = a[i], y = b[i];
    ab[lane] += x * y;
    aa[lane] += x * x;
    bb[lane] += y * y;
  };
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  }
  for (; i < count; ++i) add(i, 0);
  Dots dots{};
  for (int lane = 0; lane < kLanes; ++lane) dots += {ab[lane], aa[lane], bb[lane]};
  return dots;
}

QSGD_CLONES
Dots dots_32(const float* a, const float* b, size_t count) { return dots_loop(a, b, count); }
QSGD_CLONES
Dots dots_64(const double* a, const double* b, size_t count) { return dots_loop(a, b, count); }

template <class T>
QSGD_INLINE void combine_loop(T* own, T by_own, const T* other, T by_other, size_t count) {
  for (size_t i = 0; i < count; ++i) own[i] = by_own * own[i] + by_other * other[i];
}

QSGD_CLONES
void combine_32(float* own, float by_own, const float* other, float by_other, size_t count) {
  combine_loop(own, by_own, other, by_other, count);
}
QSGD_CLONES
void combine_64(double* own, double by_own, const double* other, double by_other, size_t count) {
  combine_loop(own, by_own, other, by_other, count);
}

// Calls f(offset in bytes, count, float32 buffer for a, the same for b) for each block.
template <class F>
void for_blocks(DType dtype, size_t count, F&& f) {
  float a[kPairs], b[kPairs];
  for (size_t at = 0; at < count; at += kPairs) {
    f(at * facts(dtype).size, std::min(kPairs, count - at), a, b);
  }
}

Factors adasum_factors(const Dots& dots) {
  return {dots.aa == 0 ? 1 : 1 - dots.ab / (2 * dots.aa),
          dots.bb == 0 ? 1 : 1 - dots.ab / (2 * dots.bb)};
}

// Dot products of floating elements, summed in an order that depends only on `count`.
Dots dots_of(const void* a, const void* b, DType dtype, size_t count) {
  if (dtype == DType::kFloat64) {
    return dots_64(static_cast<const double*>(a), static_cast<const double*>(b), count);
  }
  if (dtype == DType::kFloat32) {
    return dots_32(static_cast<const float*>(a), static_cast<const float*>(b), count);
  }
  Dots dots{};
  for_blocks(dtype, count, [&](size_t at, size_t n, float* wide_a, float* wide_b) {
    float32_from(static_cast<const char*>(a) + at, dtype, n, wide_a);
    float32_from(static_cast<const char*>(b) + at, dtype, n, wide_b);
    dots += dots_32(wide_a, wide_b, n);
  });
  return dots;
}

// own[i] = by_own * own[i] + by_other * other[i]; 16-bit floats are rounded once, at the end.
void combine(void* own, double by_own, const void* other, double by_other, DType dtype,
             size_t count) {
  if (dtype == DType::kFloat64) {
    return combine_64(static_cast<double*>(own), by_own, static_cast<const double*>(other),
                      by_other, count);
  }
  const auto x = static_cast<float>(by_own), y = static_cast<float>(by_other);
  if (dtype == DType::kFloat32) {
    return combine_32(static_cast<float*>(own), x, static_cast<const float*>(other), y, count);
  }
  for_blocks(dtype, count, [&](size_t at, size_t n, float* wide_own, float* wide_other) {
    float32_from(static_cast<const char*>(own) + at, dtype, n, wide_own);
    float32_from(static_cast<const char*>(other) + at, dtype, n, wide_other);
    combine_32(wide_own, x, wide_other, y, n);
    float32_to(wide_own, n, dtype, static_cast<char*>(own) + at);
  });
}

// A list of tensors in `parts` consecutive parts, each with its share of every tensor: any
// consecutive parts form one message, and a tensor is partitioned independently of the others in
// the list.
class Parts {
 public:
  Parts(std::vector<ReduceTensor>& tensors, const ReduceArgs& args, int parts)
      : tensors_(tensors), args_(args), parts_(parts), element_(facts(args.dtype).size) {
    for (int part = 0; part < parts; ++part) {
      for (const ReduceTensor& tensor : tensors) {
        starts_.push_back(starts_.back() + range(tensor, part).size());
      }
    }
    data_->resize(starts_.back() * element_);
  }

  size_t tensors() const { return tensors_.size(); }
  // Bytes before a part.
  size_t before(int part) const { return starts_[first(part)] * element_; }
  char* at(int part) { return data_->data() + before(part); }

  void load() {
    for_all([&](ReduceTensor& tensor, const Range& range, char* here) {
      const char* from = static_cast<const char*>(tensor.in) + range.begin * element_;
      tensor.input_finite &= all_finite(from, range.size(), args_.dtype);
      scale_copy(here, from, range.size(), args_.dtype, args_.prescale, 1);
    });
  }

  void store() {
    for_all([&](ReduceTensor& tensor, const Range& range, const char* here) {
      char* to = static_cast<char*>(tensor.out) + range.begin * element_;
      tensor.result_finite &= scale_copy(to, here, range.size(), args_.dtype, args_.postscale, 1);
    });
  }

  // By tensor: the dot products of two ranks' vectors, over the parts [begin, end).
  std::vector<Dots> dots(int begin, int end, const char* lower, const char* higher) const {
    std::vector<Dots> all(tensors());
    for_each(begin, end, [&](size_t tensor, size_t offset, size_t count) {
      all[tensor] += dots_of(lower + offset, higher + offset, args_.dtype, count);
    });
    return all;
  }

  void join(int begin, int end, const char* other, bool other_is_lower,
            const std::vector<Dots>& dots) {
    char* const own = at(begin);
    for_each(begin, end, [&](size_t tensor, size_t offset, size_t count) {
      const Factors by = adasum_factors(dots[tensor]);
      combine(own + offset, other_is_lower ? by.b : by.a, other + offset,
              other_is_lower ? by.a : by.b, args_.dtype, count);
    });
  }

 private:
  size_t first(int part) const { return static_cast<size_t>(part) * tensors(); }
  Range range(const ReduceTensor& tensor, int part) const {
    return part_of(tensor.count, 1, parts_, part);
  }

  template <class F>
  void for_all(F&& f) {
    for (int part = 0; part < parts_; ++part) {
      for (size_t t = 0; t < tensors(); ++t) {
        f(tensors_[t], range(tensors_[t], part),
          data_->data() + starts_[first(part) + t] * element_);
      }
    }
  }

  // Calls f(tensor, offset in bytes from the first of these parts, count).
  template <class F>
  void for_each(int begin, int end, F&& f) const {
    for (size_t i = first(begin); i < first(end); ++i) {
      f(i % tensors(), (starts_[i] - starts_[first(begin)]) * element_,
        starts_[i + 1] - starts_[i]);
    }
  }

  std::vector<ReduceTensor>& tensors_;
  const ReduceArgs& args_;
  const int parts_;
  const size_t element_;
  std::vector<size_t> starts_{0};  // in elements, by part and tensor
  KeptOnFailure<std::vector<char>> data_;
};

class Tree {
 public:
  Tree(Transport& transport, Parts& parts, int ranks)
      : transport_(transport), parts_(parts), ranks_(ranks), end_(ranks) {}

  // Joins the complete vectors of the surplus ranks to those of their partners.
  void fold_in(bool surplus, int partner) {
    const size_t bytes = parts_.before(ranks_);
    if (surplus) {
      exchange(partner, parts_.at(0), bytes, nullptr, 0);
    } else if (partner < transport_.size()) {
      incoming_->resize(bytes);
      exchange(partner, nullptr, 0, incoming_->data(), bytes);
      parts_.join(0, ranks_, incoming_->data(), false,
                  parts_.dots(0, ranks_, parts_.at(0), incoming_->data()));
    }
  }

  void run() {
    for (int hop = 1; hop < ranks_; hop *= 2) halve(hop);
    for (int hop = ranks_ / 2; hop > 0; hop /= 2) gather(hop);
  }

 private:
  // Keeps half of the parts that this rank and its peer share, joined with the peer's.
  void halve(int hop) {
    const int peer = transport_.rank() ^ hop, middle = begin_ + (end_ - begin_) / 2;
    const bool other_is_lower = peer < transport_.rank();
    const int given = other_is_lower ? begin_ : middle;
    const int given_end = other_is_lower ? middle : end_;
    (other_is_lower ? begin_ : end_) = middle;
    const size_t bytes = parts_.before(end_) - parts_.before(begin_);
    if (incoming_->size() < bytes) incoming_->resize(bytes);
    exchange(peer, parts_.at(given), parts_.before(given_end) - parts_.before(given),
             incoming_->data(), bytes);
    const char* const lower = other_is_lower ? incoming_->data() : parts_.at(begin_);
    const char* const higher = other_is_lower ? parts_.at(begin_) : incoming_->data();
    std::vector<Dots> dots = parts_.dots(begin_, end_, lower, higher);
    sum_over(2 * hop, dots);
    parts_.join(begin_, end_, incoming_->data(), other_is_lower, dots);
  }

  // Sums over the `group` consecutive ranks that share a pair of vectors. Both sides of each
  // exchange add the same two numbers, so all get the same bits.
  void sum_over(int group, std::vector<Dots>& dots) {
    const size_t bytes = dots.size() * sizeof(Dots);
    KeptOnFailure<std::vector<Dots>> own(dots), other(dots);
    for (int hop = 1; hop < group; hop *= 2) {
      exchange(transport_.rank() ^ hop, own->data(), bytes, other->data(), bytes);
      for (size_t i = 0; i < dots.size(); ++i) (*own)[i] += (*other)[i];
    }
    dots = *own;
  }

  // Receives the joined half that the peer has kept.
  void gather(int hop) {
    const int peer = transport_.rank() ^ hop, width = end_ - begin_;
    const int theirs = peer < transport_.rank() ? begin_ - width : end_;
    exchange(peer, parts_.at(begin_), parts_.before(end_) - parts_.before(begin_),
             parts_.at(theirs), parts_.before(theirs + width) - parts_.before(theirs));
    begin_ = begin_ < theirs ? begin_ : theirs;
    end_ = begin_ + 2 * width;
  }

  void exchange(int peer, const void* send, size_t send_bytes, void* receive,
                size_t receive_bytes) {
    send_receive(transport_, Tag::kData, peer, send, send_bytes, peer, receive, receive_bytes);
  }

  Transport& transport_;
  Parts& parts_;
  const int ranks_;
  int begin_ = 0, end_;  // the current parts of this rank
  KeptOnFailure<std::vector<char>> incoming_;
};

}  // namespace

void check_adasum(DType dtype, bool coded) {
  if (!facts(dtype).floating) {
    throw usage_error(std::string("Adasum of ") + facts(dtype).name +
                      ": it scales tensors by their angles, so they must be floating; use op=Sum "
                      "or cast the tensor");
  }
  if (coded) {
    throw usage_error(
        "Adasum of compressed gradients: it needs the ranks' own values to find their angles; use "
        "Compression.none with op=Adasum, or op=Average with this compression");
  }
}

void adasum_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                      const ReduceArgs& args) {
  check_adasum(args.dtype, false);
  if (tensors.empty()) return;
  Fold fold(transport);
  Parts parts(tensors, args, fold.ranks());
  parts.load();
  Tree tree(transport, parts, fold.ranks());
  tree.fold_in(fold.surplus(), fold.partner());
  if (!fold.surplus()) tree.run();
  fold.out(parts.at(0), parts.before(fold.ranks()));
  parts.store();
}

}  // namespace qsgd
