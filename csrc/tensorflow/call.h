// One execution of an operation: passes its tensors to the core, and its results to TensorFlow.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "foreign/table.h"
#include "tensorflow/tensors.h"

namespace qsgd::tf {

// Memory of an operation's results.
enum class Makes {
  kInPlace,     // shape of the input; in its memory if nothing else uses that
  kRows,        // allocated by the core
  kRowsCounts,  // allocated by the core, with a table of the rows from each rank
  kNumber,      // one int32; no input
};

// Sets the core of this process; attached() returns it, or null.
void attach(const QsgdTable* table);
const QsgdTable* attached();

// Copy of TensorFlow's callback, a std::function<void()>. TensorFlow destroys its own when the
// kernel's function returns, although the API has no other way to complete an operation later.
// Every build of TensorFlow for Linux has the std::function of libstdc++, whose layout is part of
// its ABI; this library may be compiled with another C++ library, which has another layout.
class Done {
 public:
  explicit Done(const TF_AsyncOpKernelDoneCallback* done);
  ~Done();
  Done(const Done&) = delete;
  Done& operator=(const Done&) = delete;

  void operator()() const { function_.invoke(function_.functor); }

 private:
  struct Functor {
    void* words[2];
  };
  struct Function {
    Functor functor;
    bool (*manage)(Functor& to, const Functor& from, int what);
    void (*invoke)(const Functor& functor);
  };

  Function function_;
};

class Call {
 public:
  Call(TF_OpKernelContext* context, const TF_AsyncOpKernelDoneCallback* done, Makes makes)
      : context_(context), done_(done), makes_(makes) {}

  // Passes the tensors and this call to the core. With `copies`, an output that does not use the
  // input's memory begins as a copy of it. With `splits`, the last input contains splits.
  static void start(std::unique_ptr<Call> call, const std::vector<std::string>& operations,
                    bool computes, bool copies, bool splits);

 private:
  struct Sent {
    Shape shape;  // as in the core
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
