// A set of ranks as a bit mask: two thousand ranks are 32 words.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace qsgd {

class RankSet {
 public:
  RankSet() = default;
  static RankSet one(int rank);
  static RankSet all(int size);
  template <class List>
  static RankSet of(const List& ranks) {
    RankSet set;
    for (const auto rank : ranks) set.add(static_cast<int>(rank));
    return set;
  }

  void add(int rank);
  void remove(int rank);
  void clear() { words_.clear(); }
  bool has(int rank) const;
  bool empty() const;
  int count() const;
  int first() const;                          // lowest rank; -1 if empty
  bool meets(const RankSet& other) const;     // whether any rank is in both
  bool contains(const RankSet& other) const;  // whether all ranks of the other are in this
  std::vector<int> list() const;              // ascending

  RankSet& operator|=(const RankSet& other);
  RankSet& operator&=(const RankSet& other);
  RankSet& operator-=(const RankSet& other);
  friend RankSet operator|(RankSet a, const RankSet& b) { return a |= b; }
  friend RankSet operator&(RankSet a, const RankSet& b) { return a &= b; }
  friend RankSet operator-(RankSet a, const RankSet& b) { return a -= b; }
  friend bool operator==(const RankSet& a, const RankSet& b) { return a.words_ == b.words_; }
  friend bool operator!=(const RankSet& a, const RankSet& b) { return !(a == b); }

 private:
  void trim();

  std::vector<uint64_t> words_;  // the last one is not 0
};

// The ranks of a process set, which do not change.
using Members = std::shared_ptr<const RankSet>;

}  // namespace qsgd
