// A fused list of tensors as one sequence of elements that can be cut anywhere.
#pragma once

#include <vector>

#include "collectives/reduce.h"
#include "common/kept.h"

namespace qsgd {

class Stream {
 public:
  // Averages are divided by `ranks`. Both references must outlive the stream.
  Stream(std::vector<ReduceTensor>& tensors, const ReduceArgs& args, int ranks);

  size_t count() const { return starts_.back(); }
  size_t element() const { return element_; }
  size_t size_bytes() const { return count() * element_; }
  const ReduceArgs& args() const { return args_; }

  // to[i] = input begin + i of this rank, times prescale. Records non-finite values.
  void load(size_t begin, size_t count, void* to);
  // result begin + i = from[i], times postscale and divided. Records non-finite values.
  void store(size_t begin, size_t count, const void* from);
  // store() of the sum of two ranks' addends, in one pass; only for sums and averages of float32.
  void store_sum(size_t begin, size_t count, const float* a, const float* b);
  // store() without arithmetic, for results that were scaled when summed.
  void place(size_t begin, size_t count, const void* from);
  // Copies results to `to`, unchanged.
  void fetch(size_t begin, size_t count, void* to) const;
  // Scales data[i] in place, as store() does.
  void finish(void* data, size_t count) const;

  // Address of these inputs (results), if they are contiguous and load() (place()) would not change
  // them; else null.
  const void* input(size_t begin, size_t count) const;
  void* result(size_t begin, size_t count) const;
  // Records non-finite values as load() and place() do, for elements used in place.
  void note_input(size_t begin, size_t count);
  void note_result(size_t begin, size_t count);

 private:
  // Calls f(tensor, offset in the tensor, count, offset in the sequence).
  template <class F>
  void visit(size_t begin, size_t count, F&& f) const;
  void write(size_t begin, size_t count, const void* from, double factor, int divisor);

  std::vector<ReduceTensor>& tensors_;
  const ReduceArgs& args_;
  const size_t element_;
  const int divisor_;
  std::vector<size_t> starts_;  // offset of every tensor, and the end
};

// A fused list of tensors as contiguous prescaled values, to be reduced in place.

// A single tensor is reduced in its result buffer; several are copied together.
class Packed {
 public:
  Packed(std::vector<ReduceTensor>& tensors, const ReduceArgs& args, int ranks)
      : stream_(tensors, args, ranks),
        data_(static_cast<char*>(stream_.result(0, stream_.count()))) {
    if (data_ == nullptr) {
      copy_->resize(stream_.size_bytes());
      data_ = copy_->data();
    }
    stream_.load(0, stream_.count(), data_);
  }

  char* at(size_t index) { return data_ + index * stream_.element(); }
  size_t count() const { return stream_.count(); }
  size_t element() const { return stream_.element(); }
  // Scales the values and writes them to the results.
  void unpack() { stream_.store(0, stream_.count(), data_); }

 private:
  Stream stream_;
  KeptOnFailure<std::vector<char>> copy_;
  char* data_;
};

}  // namespace qsgd
