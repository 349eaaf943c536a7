#include "collectives/sra2d_allreduce.h"

#include <algorithm>
#include <cstring>

#include "collectives/algorithm.h"
#include "collectives/compressed.h"
#include "collectives/sra_allreduce.h"
#include "collectives/windows.h"

namespace qsgd {
namespace {

// A segment owned by the rank in row `row` of a given column.
struct Item {
  int row;
  const Segment* segment;
};

class Sra2d {
 public:
  Sra2d(Transport& transport, SegmentCoder& coder, const std::vector<Chunk>& chunks, Grid grid,
        BufferPool& pool)
      : coder_(coder),
        chunks_(chunks),
        grid_(grid),
        row_(transport.rank() / grid.columns),
        column_(transport.rank() % grid.columns),
        row_peers_(peers_in_row()),
        column_peers_(peers_in_column()),
        sums_(items_of(column_)),
        results_out_(transport, column_peers_, Tag::kGather, messages_of(mine()), kWindow, pool),
        along_row_(transport, row_peers_, Tag::kGather, messages_in(sums_), kWindow, pool) {
    for (const int peer : row_peers_) {
      const std::vector<Item> theirs = items_of(peer % grid.columns);
      row_out_.emplace_back(transport, std::vector<int>{peer}, Tag::kData, messages_in(theirs),
                            kWindow, pool);
      row_in_.emplace_back(transport, peer, Tag::kData, messages_in(sums_), kWindow, pool);
      row_results_.emplace_back(transport, peer, Tag::kGather, messages_in(theirs), kWindow, pool);
      for_row_peers_.push_back(theirs);
    }
    for (const int peer : column_peers_) {
      const Messages theirs = messages_of(chunk_at(peer / grid.columns, column_));
      column_out_.emplace_back(transport, std::vector<int>{peer}, Tag::kData, theirs, kWindow,
                               pool);
      column_in_.emplace_back(transport, peer, Tag::kData, messages_of(mine()), kWindow, pool);
      column_results_.emplace_back(transport, peer, Tag::kGather, theirs, kWindow, pool);
    }
    sent_.resize(row_peers_.size());
    taken_.resize(row_peers_.size());
  }

  bool advance() { return pass_along_row() || sum_item() || take_result() || send_input(); }

  bool done() {
    if (summed_ < sums_.size() || passed_ < sums_.size()) return false;
    for (size_t i = 0; i < row_peers_.size(); ++i) {
      if (sent_[i] < for_row_peers_[i].size() || !row_results_[i].finished()) return false;
    }
    return results_out_.drained() && along_row_.drained() && all_drained(row_out_) &&
           all_drained(column_out_);
  }

 private:
  std::vector<int> peers_in_row() const {
    std::vector<int> peers;
    for (int hop = 1; hop < grid_.columns; ++hop) {
      peers.push_back(row_ * grid_.columns + (column_ + hop) % grid_.columns);
    }
    return peers;
  }
  std::vector<int> peers_in_column() const {
    std::vector<int> peers;
    for (int hop = 1; hop < grid_.rows; ++hop) {
      peers.push_back((row_ + hop) % grid_.rows * grid_.columns + column_);
    }
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
  // Index in column_peers_ of the peer in row `row`.
  size_t place_of(int row) const {
    return static_cast<size_t>((row - row_ + grid_.rows) % grid_.rows - 1);
  }

  // Codes this rank's input for the column of a row peer.
  bool send_input() {
    size_t least = row_peers_.size();
    for (size_t i = 0; i < row_peers_.size(); ++i) {
      if (sent_[i] == for_row_peers_[i].size()) continue;
      if (least < row_peers_.size() && sent_[i] >= sent_[least]) continue;
      if (row_out_[i].slot() != nullptr) least = i;
    }
    if (least == row_peers_.size()) return false;
    const Segment& segment = *for_row_peers_[least][sent_[least]++].segment;
    coder_.contribute(segment, {kOwn}, row_out_[least].slot());
    row_out_[least].send(segment);
    return true;
  }

  // This row's terms by column; returns false if some have not arrived.
  bool row_terms(Terms& terms) {
    terms.assign(static_cast<size_t>(grid_.columns), kOwn);
    for (ReceiveWindow& from : row_in_) {
      const uint8_t* const message = from.ready();
      if (message == nullptr) return false;
      terms[static_cast<size_t>(from.peer() % grid_.columns)] = message;
    }
    return true;
  }

  // Sums the row's terms of the next segment, and sends them to its owner in this column, or
  // concludes as its owner.
  bool sum_item() {
    if (summed_ == sums_.size()) return false;
    const Item& item = sums_[summed_];
    Terms terms;
    if (!row_terms(terms)) return false;
    if (!(item.row == row_ ? conclude(item, terms) : contribute(item, terms))) return false;
    for (ReceiveWindow& from : row_in_) from.release();
    ++summed_;
    return true;
  }

  void verify_row(const Item& item, const Terms& terms) const {
    for (const ReceiveWindow& from : row_in_) {
      coder_.verify(*item.segment, terms[static_cast<size_t>(from.peer() % grid_.columns)],
                    from.peer());
    }
  }

  bool contribute(const Item& item, const Terms& terms) {
    SendWindow& out = column_out_[place_of(item.row)];
    uint8_t* const message = out.slot();
    if (message == nullptr) return false;
    verify_row(item, terms);
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
    verify_row(item, own_row);
    for (ReceiveWindow& from : column_in_) {
      coder_.verify(*item.segment, from.ready(), from.peer());
    }
    coder_.conclude(*item.segment, terms, result);
    results_out_.send(*item.segment);
    for (ReceiveWindow& from : column_in_) from.release();
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

  bool take_result() {
    for (size_t i = 0; i < row_peers_.size(); ++i) {
      const uint8_t* const message = row_results_[i].ready();
      if (message == nullptr) continue;
      const Segment& segment = *for_row_peers_[i][taken_[i]++].segment;
      coder_.verify(segment, message, row_peers_[i]);
      coder_.accept(segment, message);
      row_results_[i].release();
      return true;
    }
    return false;
  }

  SegmentCoder& coder_;
  const std::vector<Chunk>& chunks_;
  const Grid grid_;
  const int row_;
  const int column_;
  const std::vector<int> row_peers_;
  const std::vector<int> column_peers_;
  const std::vector<Item> sums_;  // of this column
  std::vector<std::vector<Item>> for_row_peers_;
  std::vector<SendWindow> row_out_;
  std::vector<ReceiveWindow> row_in_;
  std::vector<ReceiveWindow> row_results_;
  std::vector<SendWindow> column_out_;
  std::vector<ReceiveWindow> column_in_;
  std::vector<ReceiveWindow> column_results_;
  std::vector<size_t> sent_;   // by row peer
  std::vector<size_t> taken_;  // by row peer
  SendWindow results_out_;
  SendWindow along_row_;
  size_t summed_ = 0;
  size_t concluded_ = 0;
  size_t passed_ = 0;
  size_t own_passed_ = 0;
};

}  // namespace

Grid squarest_grid(int size) {
  Grid grid{1, size};
  for (int rows = 2; rows * rows <= size; ++rows) {
    if (size % rows == 0) grid = {rows, size / rows};
  }
  return grid;
}

void sra2d_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                     const ReduceArgs& args, uint64_t seed, Workers* workers,
                     Pipelining* pipelining) {
  const Grid grid = squarest_grid(transport.size());
  if (grid.rows == 1) {
    return sra_allreduce(transport, tensors, args, seed, workers, pipelining);
  }
  const auto coder = make_coder(tensors, args, seed, transport.rank(), transport.size(), workers);
  const size_t limit = segment_limit(pipelining);
  const std::vector<Chunk> chunks = chunks_of(tensors, transport.size(), limit);
  KeptOnFailure<BufferPool> pool{BufferPool(place_of(tensors))};
  Sra2d machine(transport, *coder, chunks, grid, *pool);
  run_to_end(transport, machine);
  coder->finish();
  if (pipelining != nullptr) pipelining->peak_bytes = pool->size_bytes() + coder->scratch_bytes();
}

const AlgorithmTraits& sra2d_algorithm() {
  static constexpr AlgorithmTraits traits{
      "sra2d", kCompresses | kAnyPlace,
      [](Communicator& c, std::vector<ReduceTensor>& tensors, const ReduceArgs& args,
         uint64_t seed) {
        sra2d_allreduce(c.transport, tensors, args, seed, c.workers, c.pipelining);
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
