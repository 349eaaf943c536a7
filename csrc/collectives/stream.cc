#include "collectives/stream.h"

#include <algorithm>
#include <cstring>

namespace qsgd {

Stream::Stream(std::vector<ReduceTensor>& tensors, const ReduceArgs& args, int ranks)
    : tensors_(tensors),
      args_(args),
      element_(facts(args.dtype).size),
      divisor_(args.op == ReduceOp::kAverage ? ranks : 1) {
  starts_.reserve(tensors.size() + 1);
  starts_.push_back(0);
  for (const ReduceTensor& tensor : tensors) starts_.push_back(starts_.back() + tensor.count);
}

template <class F>
void Stream::visit(size_t begin, size_t count, F&& f) const {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
  auto t = static_cast<size_t>(after - starts_.begin()) - 1;
  for (size_t done = 0; done < count; ++t) {
    const size_t offset = begin + done - starts_[t];
    const size_t part = std::min(count - done, tensors_[t].count - offset);
    if (part > 0) f(tensors_[t], offset, part, done);
    done += part;
  }
}

void Stream::load(size_t begin, size_t count, void* to) {
  visit(begin, count, [&](ReduceTensor& t, size_t offset, size_t part, size_t at) {
    t.input_finite &= scale_copy(static_cast<char*>(to) + at * element_,
                                 static_cast<const char*>(t.in) + offset * element_, part,
                                 args_.dtype, args_.prescale, 1);
  });
}

void Stream::write(size_t begin, size_t count, const void* from, double factor, int divisor) {
  visit(begin, count, [&](ReduceTensor& t, size_t offset, size_t part, size_t at) {
    t.result_finite &= scale_copy(static_cast<char*>(t.out) + offset * element_,
                                  static_cast<const char*>(from) + at * element_, part, args_.dtype,
                                  factor, divisor);
  });
}

void Stream::store(size_t begin, size_t count, const void* from) {
  write(begin, count, from, args_.postscale, divisor_);
}

void Stream::store_sum(size_t begin, size_t count, const float* a, const float* b) {
  const auto by = static_cast<float>(args_.postscale / divisor_);
  visit(begin, count, [&](ReduceTensor& t, size_t offset, size_t part, size_t at) {
    t.result_finite &= add_scaled(static_cast<float*>(t.out) + offset, a + at, b + at, part, by);
  });
}

void Stream::place(size_t begin, size_t count, const void* from) {
  write(begin, count, from, 1, 1);
}

void Stream::fetch(size_t begin, size_t count, void* to) const {
  visit(begin, count, [&](const ReduceTensor& t, size_t offset, size_t part, size_t at) {
    std::memcpy(static_cast<char*>(to) + at * element_,
                static_cast<const char*>(t.out) + offset * element_, part * element_);
  });
}

void Stream::finish(void* data, size_t count) const {
  if (args_.postscale == 1 && divisor_ == 1) return;
  scale_copy(data, data, count, args_.dtype, args_.postscale, divisor_);
}

const void* Stream::input(size_t begin, size_t count) const {
  if (tensors_.size() != 1 || args_.prescale != 1 || begin + count > this->count()) return nullptr;
  return static_cast<const char*>(tensors_.front().in) + begin * element_;
}

void* Stream::result(size_t begin, size_t count) const {
  if (tensors_.size() != 1 || begin + count > this->count()) return nullptr;
  return static_cast<char*>(tensors_.front().out) + begin * element_;
}

void Stream::note_input(size_t begin, size_t count) {
  visit(begin, count, [&](ReduceTensor& t, size_t offset, size_t part, size_t) {
    t.input_finite &=
        all_finite(static_cast<const char*>(t.in) + offset * element_, part, args_.dtype);
  });
}

void Stream::note_result(size_t begin, size_t count) {
  visit(begin, count, [&](ReduceTensor& t, size_t offset, size_t part, size_t) {
    t.result_finite &=
        all_finite(static_cast<const char*>(t.out) + offset * element_, part, args_.dtype);
  });
}

}  // namespace qsgd
