// A fused list of tensors as contiguous prescaled values, to be reduced in place.
#pragma once

#include <vector>

#include "collectives/stream.h"
#include "common/kept.h"

namespace qsgd {

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
