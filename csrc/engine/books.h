// Names that occur again are sent as numbers. Both ends of a stream of messages keep a book of
// names; because messages arrive in order, both books are equal.
//
// A full book replaces a pseudorandom line. If it replaced the oldest, a step with one name more
// than there are lines would never find any.
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

// A report that one or several ranks are ready for an operation.
struct Submission {
  OperationPtr operation;
  double nmse = 0;  // largest of the ranks' last NMSE for this name
  Numbers rows{};   // of an allgather of several ranks, by rank; empty: all as in the operation
  int last = -1;    // the last of several ranks
  // On the rank itself: device work that must finish before the submission. Null: none.
  std::shared_ptr<gpu::Mark> ready = nullptr;

  // Rows that the n-th of the ranks contributes to an allgather.
  int64_t rows_of(size_t place) const { return rows.empty() ? operation->rows() : rows.at(place); }
};

// Shares equal operations of different ranks, so that most comparisons are of addresses.
class OperationPool {
 public:
  OperationPtr pooled(OperationPtr operation);
  // The same, found by address, for an operation of this rank, which may occur again.
  OperationPtr twin(const OperationPtr& own);

 private:
  KeyMap<OperationPtr> operations_;
  std::unordered_map<OperationPtr, OperationPtr> twins_;
};

// Operations that this rank has reported to its parent.
class SentBook {
 public:
  explicit SentBook(size_t capacity) : operations_(capacity) {}

  // Writes known submissions as numbers to `known`, the others in full to `items`.
  void write(const std::vector<Submission>& submissions, Writer& known, Writer& items);

 private:
  const uint16_t* find(const Submission& submission) const;
  uint16_t add(const OperationPtr& operation);

  std::vector<OperationPtr> operations_;  // by line
  uint64_t written_ = 0;
  KeyMap<uint16_t> lines_;
  // The same by address: a prepared operation is the same object in every step.
  std::unordered_map<const Operation*, uint16_t> prepared_;
};

// Operations received from one child.
class ReceivedBook {
 public:
  ReceivedBook(size_t capacity, std::shared_ptr<OperationPool> pool)
      : capacity_(capacity), pool_(std::move(pool)) {}

  // Read what SentBook::write() has written: one item, or all known ones.
  Submission read_item(Reader& from);
  std::vector<Submission> read_known(Reader& from);

 private:
  void add(const OperationPtr& operation);

  size_t capacity_;
  std::shared_ptr<OperationPool> pool_;
  std::vector<OperationPtr> lines_;
  uint64_t written_ = 0;
};

// The names in rank 0's responses: one book for all ranks, each of which reads the responses of its
// sets.
class NameBook {
 public:
  explicit NameBook(size_t capacity) : keys_(capacity) {}

  void write(int32_t set, const std::vector<std::string>& names, bool lasting, Writer& to);
  std::vector<std::string> read(int32_t set, Reader& from);

 private:
  // Assigns to `key` a line that the current response does not use.
  uint16_t add(Key key, const std::vector<uint16_t>& in_use);

  std::vector<Key> keys_;  // by number
  uint64_t written_ = 0;
  KeyMap<uint16_t> numbers_;  // on rank 0
};

}  // namespace qsgd
