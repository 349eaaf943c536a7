// SRA on a grid of ranks, as square as possible, for many ranks: each rank exchanges messages with
// its row and its column instead of all others, with one more quantisation.
//
// Ranks of a row send each other codes of the elements that the other's column owns, and sum them;
// ranks of a column do SRA on the sums; its codes are then forwarded along the rows unchanged. With
// w the normalised variance of the quantiser, the mean of independent gradients has a normalised
// error of about 3 w. Each rank sends 2 (p-1)/p of the compressed size, in 3 (rows + columns)
// messages per segment instead of 2 p. With a prime number of ranks there is no grid: SRA is used,
// with 2 w.
#include <algorithm>
#include <cstring>

#include "collectives/algorithm.h"
#include "collectives/compressed.h"

namespace qsgd {
namespace {

// Rank = row * columns + column.
struct Grid {
  int rows;
  int columns;
};

// rows <= columns; {1, size} if size is prime.
Grid squarest_grid(int size) {
  Grid grid{1, size};
  for (int rows = 2; rows * rows <= size; ++rows) {
    if (size % rows == 0) grid = {rows, size / rows};
  }
  return grid;
}

// A segment owned by the rank in row `row` of a given column.
struct Item {
  int row;
  const Segment* segment;
};

class Sra2d {
 public:
  Sra2d(Transport& transport, SegmentCoder& coder, const std::vector<Chunk>& chunks,
        BufferPool& pool)
      : coder_(coder),
        chunks_(chunks),
        grid_(squarest_grid(transport.size())),
        row_(transport.rank() / grid_.columns),
        column_(transport.rank() % grid_.columns),
        sums_(items_of(column_)),
        results_out_(transport, column_peers(), Tag::kGather, messages_of(mine()), pool),
        along_row_(transport, row_peers(), Tag::kGather, messages_in(sums_), pool) {
    for (const int peer : row_peers()) {
      row_in_.emplace_back(transport, peer, Tag::kData, messages_in(sums_), pool);
      owners_.add(transport, peer, messages_in(items_of(peer % grid_.columns)), pool);
    }
    for (const int peer : column_peers()) {
      const Messages theirs = messages_of(chunk_at(peer / grid_.columns, column_));
      column_out_.emplace_back(transport, std::vector<int>{peer}, Tag::kData, theirs, pool);
      column_in_.emplace_back(transport, peer, Tag::kData, messages_of(mine()), pool);
      column_results_.emplace_back(transport, peer, Tag::kGather, theirs, pool);
    }
  }

  bool advance() {
    return pass_along_row() || sum_item() || owners_.take_result(coder_) ||
           owners_.send_input(coder_);
  }

  bool done() {
    return summed_ == sums_.size() && passed_ == sums_.size() && owners_.done() &&
           results_out_.drained() && along_row_.drained() && owners_.drained() &&
           std::all_of(column_out_.begin(), column_out_.end(),
                       [](SendWindow& out) { return out.drained(); });
  }

 private:
  std::vector<int> row_peers() const {
    std::vector<int> peers = ranks_behind(column_, grid_.columns);
    for (int& peer : peers) peer += row_ * grid_.columns;
    return peers;
  }
  std::vector<int> column_peers() const {
    std::vector<int> peers = ranks_behind(row_, grid_.rows);
    for (int& peer : peers) peer = peer * grid_.columns + column_;
    return peers;
  }
  const Chunk& chunk_at(int row, int column) const {
    return chunks_[static_cast<size_t>(row * grid_.columns + column)];
  }
  const Chunk& mine() const { return chunk_at(row_, column_); }

  // A column's segments in the order in which this row handles them, its own row's last: by then,
  // this rank has sent everything that the others need for theirs.
  std::vector<Item> items_of(int column) const {
    size_t longest = 0;
    for (int row = 0; row < grid_.rows; ++row) {
      longest = std::max(longest, chunk_at(row, column).size());
    }
    std::vector<Item> items;
    for (size_t s = 0; s < longest; ++s) {
      for (int hop = 1; hop <= grid_.rows; ++hop) {
        const int row = (row_ + hop) % grid_.rows;
        const Chunk& chunk = chunk_at(row, column);
        if (s < chunk.size()) items.push_back({row, &chunk[s]});
      }
    }
    return items;
  }
  static Messages messages_in(const std::vector<Item>& items) {
    Messages messages;
    for (const Item& item : items) messages.push_back(item.segment);
    return messages;
  }
  // Index in column_peers() of the peer in row `row`.
  size_t place_of(int row) const {
    return static_cast<size_t>((row - row_ + grid_.rows) % grid_.rows - 1);
  }

  // Sums the row's terms of the next segment, and sends them to its owner in this column, or
  // concludes as its owner.
  bool sum_item() {
    if (summed_ == sums_.size()) return false;
    const Item& item = sums_[summed_];
    Terms terms(static_cast<size_t>(grid_.columns), kOwn);  // of this row, by column
    if (!collect(row_in_, terms)) return false;
    if (!(item.row == row_ ? conclude(item, terms) : contribute(item, terms))) return false;
    release_all(row_in_);
    ++summed_;
    return true;
  }

  bool contribute(const Item& item, const Terms& terms) {
    SendWindow& out = column_out_[place_of(item.row)];
    uint8_t* const message = out.slot();
    if (message == nullptr) return false;
    verify_all(coder_, *item.segment, row_in_);
    coder_.contribute(*item.segment, terms, message);
    out.send(*item.segment);
    return true;
  }

  // All rows' terms in order: one sum from each other row, and this row's terms separately.
  bool conclude(const Item& item, const Terms& own_row) {
    Terms terms;
    for (int row = 0; row < grid_.rows; ++row) {
      if (row == row_) {
        terms.insert(terms.end(), own_row.begin(), own_row.end());
        continue;
      }
      terms.push_back(column_in_[place_of(row)].ready());
      if (terms.back() == nullptr) return false;
    }
    if (concluded_ == own_passed_ + results_out_.depth()) return false;  // see pass_along_row
    uint8_t* const result = results_out_.slot();
    if (result == nullptr) return false;
    verify_all(coder_, *item.segment, row_in_);
    verify_all(coder_, *item.segment, column_in_);
    coder_.conclude(*item.segment, terms, result);
    results_out_.send(*item.segment);
    release_all(column_in_);
    ++concluded_;
    return true;
  }

  // Forwards this column's results along the row, without coding them again.
  bool pass_along_row() {
    if (passed_ == sums_.size()) return false;
    const Item& item = sums_[passed_];
    const bool own = item.row == row_;
    const uint8_t* message = nullptr;
    if (!own) {
      message = column_results_[place_of(item.row)].ready();
    } else if (own_passed_ < concluded_) {
      message = results_out_.sent(own_passed_);
    }
    uint8_t* const to = message == nullptr ? nullptr : along_row_.slot();
    if (to == nullptr) return false;
    if (own) {
      ++own_passed_;
    } else {
      coder_.verify(*item.segment, message, item.row * grid_.columns + column_);
      coder_.accept(*item.segment, message);
    }
    std::memcpy(to, message, item.segment->bytes);
    along_row_.send(*item.segment);
    if (!own) column_results_[place_of(item.row)].release();
    ++passed_;
    return true;
  }

  SegmentCoder& coder_;
  const std::vector<Chunk>& chunks_;
  const Grid grid_;
  const int row_;
  const int column_;
  const std::vector<Item> sums_;  // of this column
  Owners owners_;                 // this row's other columns
  std::vector<ReceiveWindow> row_in_;
  std::vector<SendWindow> column_out_;
  std::vector<ReceiveWindow> column_in_;
  std::vector<ReceiveWindow> column_results_;
  SendWindow results_out_;
  SendWindow along_row_;
  size_t summed_ = 0;
  size_t concluded_ = 0;
  size_t passed_ = 0;
  size_t own_passed_ = 0;
};

}  // namespace

const AlgorithmTraits& sra2d_algorithm() {
  static constexpr AlgorithmTraits traits{
      "sra2d", kCompresses | kAnyPlace,
      [](Communicator& c, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
         uint64_t seed) {
        const bool is_flat = squarest_grid(c.transport.size()).rows == 1;
        (is_flat ? traits_of(Algorithm::kSra).run : run_compressed<Sra2d>)(c, tensors, args, seed);
      },
      [](const Layout& layout, size_t count, double width) {
        const Grid grid = squarest_grid(layout.ranks);
        if (grid.rows == 1) return traits_of(Algorithm::kSra).load(layout, count, width);
        const double p = layout.ranks, rows = grid.rows, columns = grid.columns;
        const double n = static_cast<double>(count);
        Load load;
        load.messages = 2 * (rows + columns - 2);
        load.wire_bytes = 2 * (p - 1) / p * n * width;
        // To the owners in the columns, then of the rest to those in the rows, then the result.
        load.encoded = ((columns - 1) / columns + (rows - 1) / p + 1 / p) * n;
        load.decoded_and_added = ((columns - 1) / columns + (rows - 1) / p) * n;
        load.decoded = n;
        return load;
      }};
  return traits;
}

}  // namespace qsgd
