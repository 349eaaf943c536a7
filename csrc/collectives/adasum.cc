#include "collectives/adasum.h"

#include <string>

#include "collectives/adasum_math.h"
#include "collectives/exchange.h"
#include "collectives/fold.h"
#include "collectives/schedule.h"
#include "common/error.h"
#include "common/kept.h"

namespace qsgd {
namespace {

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
