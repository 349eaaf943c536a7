#include "engine/books.h"

#include <algorithm>

namespace qsgd {
namespace {

// Line to write after `written` others: the next free one, or a pseudorandom one, which both ends
// compute alike.
size_t place_of(uint64_t written, size_t lines) {
  if (written < lines) return static_cast<size_t>(written);
  uint64_t mixed = written * 0x9e3779b97f4a7c15u;  // Fibonacci hashing
  mixed ^= mixed >> 32;
  return static_cast<size_t>(mixed % lines);
}

// Whether its NMSE is reported in every step.
bool reports_nmse(const Operation& operation) {
  return operation.coding && operation.coding->nmse_budget > 0;
}

// Whether it may be sent as a number.
bool may_be_known(const Submission& submission) {
  return submission.operation->lasting && submission.rows.empty();
}

// Consecutive numbers are written as one run, so a step's gradients take a few bytes.
void write_numbers(const std::vector<uint16_t>& numbers, Writer& to) {
  std::vector<std::pair<uint16_t, uint16_t>> runs;  // first number, how many
  for (const uint16_t number : numbers) {
    const bool follows = !runs.empty() && number == runs.back().first + runs.back().second;
    if (follows) {
      ++runs.back().second;
    } else {
      runs.emplace_back(number, 1);
    }
  }
  to.put(static_cast<uint16_t>(runs.size()));
  for (const auto& [first, count] : runs) {
    to.put(first);
    to.put(count);
  }
}

std::vector<uint16_t> read_numbers(Reader& from) {
  std::vector<uint16_t> numbers;
  const auto runs = from.get<uint16_t>();
  for (uint16_t run = 0; run < runs; ++run) {
    const auto first = from.get<uint16_t>();
    const auto count = from.get<uint16_t>();
    for (uint16_t i = 0; i < count; ++i) numbers.push_back(static_cast<uint16_t>(first + i));
  }
  return numbers;
}

// Run-length encoding of the ranks that were last.
void write_last(const std::vector<int>& ranks, Writer& to) {
  for (auto run = ranks.begin(); run != ranks.end();) {
    const auto end = std::find_if(run, ranks.end(), [&](int rank) { return rank != *run; });
    to.put(static_cast<uint16_t>(end - run));
    to.put(static_cast<int32_t>(*run));
    run = end;
  }
}

void read_last(Reader& from, std::vector<Submission>& submissions) {
  for (size_t at = 0; at < submissions.size();) {
    const auto end = at + from.get<uint16_t>();
    const auto rank = from.get<int32_t>();
    while (at < end) submissions.at(at++).last = rank;
  }
}

}  // namespace

OperationPtr OperationPool::pooled(OperationPtr operation) {
  if (operations_.size() >= kMaxBook) operations_.clear();  // drops names that are no longer used
  OperationPtr& one = operations_[operation->key()];
  if (one == nullptr || !(*one == *operation)) one = std::move(operation);
  return one;
}

OperationPtr OperationPool::twin(const OperationPtr& own) {
  if (!own->lasting) return own;
  if (twins_.size() >= kMaxBook) twins_.clear();
  OperationPtr& one = twins_[own];
  if (one == nullptr) one = pooled(own);
  return one;
}

void SentBook::write(const std::vector<Submission>& submissions, Writer& known, Writer& items) {
  std::vector<uint16_t> numbers, fresh;
  std::vector<int> last;
  Writer errors;
  for (const Submission& submission : submissions) {
    const OperationPtr& operation = submission.operation;
    const uint16_t* const number = find(submission);
    // Known ones are read first, before the new ones of this call.
    if (number != nullptr && std::count(fresh.begin(), fresh.end(), *number) == 0) {
      numbers.push_back(*number);
      if (reports_nmse(*operation)) errors.put(submission.nmse);
      last.push_back(submission.last);
      continue;
    }
    if (may_be_known(submission) && !operations_.empty()) fresh.push_back(add(operation));
    qsgd::write(*operation, items);
    items.put(submission.nmse);
    write_list(submission.rows, items);
    items.put(static_cast<int32_t>(submission.last));
  }
  if (numbers.empty()) return;
  write_numbers(numbers, known);
  known.append(errors.bytes());
  const bool of_one = std::all_of(last.begin(), last.end(), [](int rank) { return rank < 0; });
  if (!of_one) write_last(last, known);
}

const uint16_t* SentBook::find(const Submission& submission) const {
  const Operation& operation = *submission.operation;
  if (!may_be_known(submission)) return nullptr;
  const auto prepared = prepared_.find(&operation);
  if (prepared != prepared_.end()) return &prepared->second;
  const auto line = lines_.find(operation.key());
  if (line == lines_.end() || !(*operations_[line->second] == operation)) return nullptr;
  return &line->second;
}

uint16_t SentBook::add(const OperationPtr& operation) {
  const size_t place = place_of(written_++, operations_.size());
  OperationPtr& line = operations_[place];
  if (line != nullptr) {
    prepared_.erase(line.get());
    const auto old = lines_.find(line->key());
    // A name whose operation has changed has a newer line.
    if (old != lines_.end() && old->second == place) lines_.erase(old);
  }
  line = operation;
  return lines_[operation->key()] = prepared_[operation.get()] = static_cast<uint16_t>(place);
}

Submission ReceivedBook::read_item(Reader& from) {
  Submission submission{std::make_shared<const Operation>(read_operation(from))};
  submission.nmse = from.get<double>();
  submission.rows = read_list(from);
  submission.last = from.get<int32_t>();
  if (!may_be_known(submission)) return submission;
  submission.operation = pool_->pooled(std::move(submission.operation));
  add(submission.operation);
  return submission;
}

void ReceivedBook::add(const OperationPtr& operation) {
  if (capacity_ == 0) return;
  const size_t place = place_of(written_++, capacity_);
  if (place == lines_.size()) lines_.emplace_back();
  lines_[place] = operation;
}

std::vector<Submission> ReceivedBook::read_known(Reader& from) {
  std::vector<Submission> submissions;
  for (const uint16_t number : read_numbers(from)) submissions.push_back({lines_.at(number)});
  for (Submission& submission : submissions) {
    if (reports_nmse(*submission.operation)) submission.nmse = from.get<double>();
  }
  if (!from.done()) read_last(from, submissions);
  return submissions;
}

void NameBook::write(int32_t set, const std::vector<std::string>& names, bool lasting, Writer& to) {
  // With more names than lines, names of one answer would replace each other.
  const bool numbered = lasting && names.size() <= keys_.size();
  to.put(static_cast<uint8_t>(numbered));
  if (!numbered) {
    to.put(static_cast<uint32_t>(names.size()));
    for (const std::string& name : names) to.put(name);
    return;
  }
  Writer fresh;
  uint16_t fresh_count = 0;
  std::vector<uint16_t> numbers;
  for (const std::string& name : names) {
    const auto known = numbers_.find({set, name});
    if (known != numbers_.end()) {
      numbers.push_back(known->second);
      continue;
    }
    numbers.push_back(add({set, name}, numbers));
    fresh.put(numbers.back());
    fresh.put(name);
    ++fresh_count;
  }
  to.put(fresh_count);
  to.append(fresh.bytes());
  write_numbers(numbers, to);
}

uint16_t NameBook::add(Key key, const std::vector<uint16_t>& in_use) {
  const auto used = [&](size_t place) {
    return std::find(in_use.begin(), in_use.end(), place) != in_use.end();
  };
  size_t place = place_of(written_++, keys_.size());
  while (used(place)) place = (place + 1) % keys_.size();
  const auto number = static_cast<uint16_t>(place);
  numbers_.erase(keys_[number]);
  numbers_[key] = number;
  keys_[number] = std::move(key);
  return number;
}

std::vector<std::string> NameBook::read(int32_t set, Reader& from) {
  std::vector<std::string> names;
  if (from.get<uint8_t>() == 0) {
    names.resize(from.get<uint32_t>());
    for (std::string& name : names) name = from.text();
    return names;
  }
  const auto fresh = from.get<uint16_t>();
  for (uint16_t i = 0; i < fresh; ++i) {
    const auto number = from.get<uint16_t>();
    keys_.at(number) = {set, from.text()};
  }
  for (const uint16_t number : read_numbers(from)) names.push_back(keys_.at(number).second);
  return names;
}

}  // namespace qsgd
