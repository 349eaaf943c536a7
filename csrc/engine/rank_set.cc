#include "engine/rank_set.h"

#include <algorithm>

namespace qsgd {
namespace {

constexpr int kWord = 64;

size_t word_of(int rank) { return static_cast<size_t>(rank / kWord); }
uint64_t bit_of(int rank) { return uint64_t{1} << (rank % kWord); }

}  // namespace

RankSet RankSet::one(int rank) {
  RankSet set;
  set.add(rank);
  return set;
}

RankSet RankSet::all(int size) {
  RankSet set;
  set.words_.assign(word_of(size), ~uint64_t{0});
  if (size % kWord != 0) set.words_.push_back(bit_of(size) - 1);
  return set;
}

void RankSet::add(int rank) {
  if (word_of(rank) >= words_.size()) words_.resize(word_of(rank) + 1);
  words_[word_of(rank)] |= bit_of(rank);
}

void RankSet::remove(int rank) {
  if (!has(rank)) return;
  words_[word_of(rank)] &= ~bit_of(rank);
  trim();
}

bool RankSet::has(int rank) const {
  return word_of(rank) < words_.size() && (words_[word_of(rank)] & bit_of(rank)) != 0;
}

bool RankSet::empty() const { return words_.empty(); }

int RankSet::count() const {
  int count = 0;
  for (const uint64_t word : words_) count += __builtin_popcountll(word);
  return count;
}

int RankSet::first() const {
  for (size_t w = 0; w < words_.size(); ++w) {
    if (words_[w] != 0) return static_cast<int>(w) * kWord + __builtin_ctzll(words_[w]);
  }
  return -1;
}

bool RankSet::meets(const RankSet& other) const {
  const size_t common = std::min(words_.size(), other.words_.size());
  for (size_t w = 0; w < common; ++w) {
    if ((words_[w] & other.words_[w]) != 0) return true;
  }
  return false;
}

bool RankSet::contains(const RankSet& other) const {
  if (other.words_.size() > words_.size()) return false;
  for (size_t w = 0; w < other.words_.size(); ++w) {
    if ((other.words_[w] & ~words_[w]) != 0) return false;
  }
  return true;
}

std::vector<int> RankSet::list() const {
  std::vector<int> ranks;
  for (size_t w = 0; w < words_.size(); ++w) {
    for (uint64_t left = words_[w]; left != 0; left &= left - 1) {
      ranks.push_back(static_cast<int>(w) * kWord + __builtin_ctzll(left));
    }
  }
  return ranks;
}

RankSet& RankSet::operator|=(const RankSet& other) {
  if (words_.size() < other.words_.size()) words_.resize(other.words_.size());
  for (size_t w = 0; w < other.words_.size(); ++w) words_[w] |= other.words_[w];
  return *this;
}

RankSet& RankSet::operator&=(const RankSet& other) {
  if (words_.size() > other.words_.size()) words_.resize(other.words_.size());
  for (size_t w = 0; w < words_.size(); ++w) words_[w] &= other.words_[w];
  trim();
  return *this;
}

RankSet& RankSet::operator-=(const RankSet& other) {
  const size_t common = std::min(words_.size(), other.words_.size());
  for (size_t w = 0; w < common; ++w) words_[w] &= ~other.words_[w];
  trim();
  return *this;
}

void RankSet::trim() {
  while (!words_.empty() && words_.back() == 0) words_.pop_back();
}

}  // namespace qsgd
