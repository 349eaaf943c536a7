// One run of an operation: its tensors on their way to the core, and its results on their way back.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "foreign/table.h"
#include "tensorflow/tensors.h"

namespace qsgd::tf {

// Where an operation's results come from.
enum class Makes {
  kInPlace,     // of the input's shape: in the input's memory where nobody else needs it
  kRows,        // by the core
  kRowsCounts,  // by the core, with a table of how many rows came from each rank
  kNumber,      // one int32, without an input
};

// The core that this process has, or null.
void attach(const QsgdTable* table);
const QsgdTable* attached();

class Call {
 public:
  // `done` is gone when the kernel's function has returned, although the API has no other way to
  // say later that an operation has ended. It points to TensorFlow's own std::function, which
  // every build of TensorFlow for Linux takes from libstdc++, so a copy of it is made.
  Call(TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done, Makes makes)
      : context_(context), done_(*reinterpret_cast<const Done*>(done)), makes_(makes) {}

  // Hands the tensors to the core, and this call with them. With `copies`, what is reduced in
  // memory of its own starts as a copy of the input. The last input holds splits where they are
  // asked for.
  static void start(std::unique_ptr<Call> call, const std::vector<std::string>& operations,
                    bool computes, bool copies, bool splits);

 private:
  using Done = std::function<void()>;
  struct Sent {
    Shape shape;  // as the core counts it
    TF_DataType type;
    Form form;
    const void* in;
    void* out;
  };
  using Kept = std::vector<Tensor>;

  void take(int index, bool computes, bool copies, Kept& kept);
  void take_splits(int index);
  std::vector<QsgdTensor> describe(const std::vector<std::string>& operations) const;
  void set_outputs(const QsgdOutcome& outcome) const;
  void set_rows(int index, const QsgdResult& result) const;
  void set_counts(int index, const QsgdOutcome& outcome) const;
  void set_number(int64_t value) const;
  void fail(TF_Code code, const char* message) const;
  void finish(const QsgdOutcome& outcome) const;

  TF_OpKernelContext* const context_;
  const Done done_;
  const Makes makes_;
  std::vector<Sent> sent_;
  std::vector<int64_t> splits_;
};

}  // namespace qsgd::tf
