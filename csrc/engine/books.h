// Names that come again travel as numbers. The two ends of a stream of messages each keep a book,
// and since messages keep their order, both write the same into it.
//
// In a full book any line may have to make room: were it the oldest, then of a step with one name
// more than there are lines none would ever be found.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/operation.h"

namespace qsgd {

constexpr size_t kMaxBook = 4096;  // lines

// That a rank is ready for an operation.
struct Submission {
  OperationPtr operation;
  double nmse = 0;  // of this rank's codes of the name when it last came
};

// Numbers in a row are written as one run, so a step's gradients take a few bytes.
void write_numbers(const std::vector<uint16_t>& numbers, Writer& to);
std::vector<uint16_t> read_numbers(Reader& from);

// What this rank has told rank 0 of itself.
class SentBook {
 public:
  explicit SentBook(size_t capacity) : operations_(capacity) {}

  // Writes submissions, known ones as numbers into `known` and the others as items.
  void write(const std::vector<Submission>& submissions, Writer& known, Writer& items);

 private:
  const uint16_t* find(const Operation& operation) const;
  void add(const OperationPtr& operation);

  std::vector<OperationPtr> operations_;  // by number
  uint64_t written_ = 0;
  KeyMap<uint16_t> lines_;
  // The same by their addresses: an operation that was prepared is the same one in every step.
  std::unordered_map<const Operation*, uint16_t> prepared_;
};

// What rank 0 has heard from one rank.
class HeardBook {
 public:
  explicit HeardBook(size_t capacity) : capacity_(capacity) {}

  // Reads back what SentBook::write() made of one item, or of the known ones.
  Submission read_item(Reader& from);
  std::vector<Submission> read_known(Reader& from);

 private:
  void add(const OperationPtr& operation);

  size_t capacity_;
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
