// Names that come again travel as numbers. The two ends of a stream of messages each keep a book,
// and since messages keep their order, both write the same into it.
//
// In a full book any line may have to make room: were it the oldest, then of a step with one name
// more than there are lines none would ever be found.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/operation.h"
#include "gpu/device.h"

namespace qsgd {

constexpr size_t kMaxBook = 4096;  // lines

// That a rank, or several, are ready for an operation.
struct Submission {
  OperationPtr operation;
  double nmse = 0;  // of a rank's codes of the name when it last came, the largest
  Numbers rows{};   // of an allgather of several ranks, in order; or all as the operation says
  int last = -1;    // which of several ranks came last
  // On the rank itself: what a device must have done before it may be told of. Null: nothing.
  std::shared_ptr<gpu::Mark> ready = nullptr;

  // What the n-th of the ranks brings to an allgather.
  int64_t rows_of(size_t place) const { return rows.empty() ? operation->rows() : rows.at(place); }
};

// Of operations that are equal one is kept, whichever rank has told of it, so that most comparisons
// are of addresses.
class OperationPool {
 public:
  OperationPtr pooled(OperationPtr operation);
  // The same for one that may come again itself, as this rank's own do: found by its address.
  OperationPtr twin(const OperationPtr& own);

 private:
  KeyMap<OperationPtr> operations_;
  std::unordered_map<OperationPtr, OperationPtr> twins_;
};

// Numbers in a row are written as one run, so a step's gradients take a few bytes.
void write_numbers(const std::vector<uint16_t>& numbers, Writer& to);
std::vector<uint16_t> read_numbers(Reader& from);

// What this rank has told its parent.
class SentBook {
 public:
  explicit SentBook(size_t capacity) : operations_(capacity) {}

  // Writes submissions, known ones as numbers into `known` and the others as items.
  void write(const std::vector<Submission>& submissions, Writer& known, Writer& items);

 private:
  const uint16_t* find(const Submission& submission) const;
  uint16_t add(const OperationPtr& operation);

  std::vector<OperationPtr> operations_;  // by number
  uint64_t written_ = 0;
  KeyMap<uint16_t> lines_;
  // The same by their addresses: an operation that was prepared is the same one in every step.
  std::unordered_map<const Operation*, uint16_t> prepared_;
};

// What a rank has heard from one of its children.
class HeardBook {
 public:
  HeardBook(size_t capacity, std::shared_ptr<OperationPool> pool)
      : capacity_(capacity), pool_(std::move(pool)) {}

  // Reads back what SentBook::write() made of one item, or of the known ones.
  Submission read_item(Reader& from);
  std::vector<Submission> read_known(Reader& from);

 private:
  void add(const OperationPtr& operation);

  size_t capacity_;
  std::shared_ptr<OperationPool> pool_;
  std::vector<OperationPtr> lines_;
  uint64_t written_ = 0;
};

// The names in rank 0's answers: one book for all ranks, of which each reads what its sets do.
class NameBook {
 public:
  explicit NameBook(size_t capacity) : keys_(capacity) {}

  void write(int32_t set, const std::vector<std::string>& names, bool lasting, Writer& to);
  std::vector<std::string> read(int32_t set, Reader& from);

 private:
  // Gives `key` the number of a line that the answer being written does not use.
  uint16_t add(Key key, const std::vector<uint16_t>& in_use);

  std::vector<Key> keys_;  // by number
  uint64_t written_ = 0;
  KeyMap<uint16_t> numbers_;  // on rank 0
};

}  // namespace qsgd
