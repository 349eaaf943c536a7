// A fused list of tensors as one run of elements that can be cut anywhere.
#pragma once

#include <vector>

#include "collectives/reduce.h"

namespace qsgd {

class Stream {
 public:
  // `ranks` divides averages. Both arguments must outlive the stream.
  Stream(std::vector<ReduceTensor>& tensors, const ReduceArgs& args, int ranks);

  size_t count() const { return starts_.back(); }
  size_t element() const { return element_; }
  size_t size_bytes() const { return count() * element_; }
  const ReduceArgs& args() const { return args_; }

  // to[i] = input begin + i of this rank, times prescale. Notes values that are not finite.
  void load(size_t begin, size_t count, void* to);
  // result begin + i = from[i], times postscale and divided. Notes values that are not finite.
  void store(size_t begin, size_t count, const void* from);
  // The same of two ranks' addends, in one pass; only for sums and averages of float32.
  void store_sum(size_t begin, size_t count, const float* a, const float* b);
  // As store() without arithmetic, for results that were scaled where they were summed.
  void place(size_t begin, size_t count, const void* from);
  // Copies results out as they are.
  void fetch(size_t begin, size_t count, void* to) const;
  // In place: data[i] is scaled as store() does it.
  void finish(void* data, size_t count) const;

  // Where the run's inputs or results lie, if that is in one piece and loading (placing) would
  // change nothing; else null.
  const void* input(size_t begin, size_t count) const;
  void* result(size_t begin, size_t count) const;
  // What load() and place() note, for runs used where they lie.
  void note_input(size_t begin, size_t count);
  void note_result(size_t begin, size_t count);

 private:
  // f(tensor, offset in the tensor, count, offset in the run).
  template <class F>
  void visit(size_t begin, size_t count, F&& f) const;
  void write(size_t begin, size_t count, const void* from, double factor, int divisor);

  std::vector<ReduceTensor>& tensors_;
  const ReduceArgs& args_;
  const size_t element_;
  const int divisor_;
  std::vector<size_t> starts_;  // of every tensor, and the end
};

}  // namespace qsgd
