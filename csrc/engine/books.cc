#include "engine/books.h"

#include <algorithm>

namespace qsgd {
namespace {

// The line to write after `written` others: the next one while there is one, then any, which both
// ends find alike.
size_t place_of(uint64_t written, size_t lines) {
  if (written < lines) return static_cast<size_t>(written);
  uint64_t mixed = written * 0x9e3779b97f4a7c15u;  // Fibonacci hashing
  mixed ^= mixed >> 32;
  return static_cast<size_t>(mixed % lines);
}

// Whether it says in every step how well it was coded.
bool reports_nmse(const Operation& operation) {
  return operation.coding && operation.coding->nmse_budget > 0;
}

}  // namespace

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

void SentBook::write(const std::vector<Submission>& submissions, Writer& known, Writer& items) {
  std::vector<uint16_t> numbers;
  Writer errors;
  for (const auto& [operation, nmse] : submissions) {
    if (const uint16_t* const number = find(*operation)) {
      numbers.push_back(*number);
      if (reports_nmse(*operation)) errors.put(nmse);
      continue;
    }
    if (operation->lasting) add(operation);
    qsgd::write(*operation, items);
    items.put(nmse);
  }
  if (numbers.empty()) return;
  write_numbers(numbers, known);
  known.append(errors.bytes());
}

const uint16_t* SentBook::find(const Operation& operation) const {
  const auto prepared = prepared_.find(&operation);
  if (prepared != prepared_.end()) return &prepared->second;
  if (!operation.lasting) return nullptr;
  const auto line = lines_.find(operation.key());
  if (line == lines_.end() || !(*operations_[line->second] == operation)) return nullptr;
  return &line->second;
}

void SentBook::add(const OperationPtr& operation) {
  if (operations_.empty()) return;
  const size_t place = place_of(written_++, operations_.size());
  OperationPtr& line = operations_[place];
  if (line != nullptr) {
    prepared_.erase(line.get());
    const auto old = lines_.find(line->key());
    // A name whose operation has changed has a newer line.
    if (old != lines_.end() && old->second == place) lines_.erase(old);
  }
  line = operation;
  lines_[operation->key()] = prepared_[operation.get()] = static_cast<uint16_t>(place);
}

Submission HeardBook::read_item(Reader& from) {
  Submission submission{std::make_shared<const Operation>(read_operation(from))};
  submission.nmse = from.get<double>();
  if (submission.operation->lasting) add(submission.operation);
  return submission;
}

void HeardBook::add(const OperationPtr& operation) {
  if (capacity_ == 0) return;
  const size_t place = place_of(written_++, capacity_);
  if (place == lines_.size()) lines_.emplace_back();
  lines_[place] = operation;
}

std::vector<Submission> HeardBook::read_known(Reader& from) {
  std::vector<Submission> submissions;
  for (const uint16_t number : read_numbers(from)) submissions.push_back({lines_.at(number)});
  for (auto& [operation, nmse] : submissions) {
    if (reports_nmse(*operation)) nmse = from.get<double>();
  }
  return submissions;
}

void NameBook::write(int32_t set, const std::vector<std::string>& names, bool lasting, Writer& to) {
  // More than fit would take each other's places within one answer.
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
