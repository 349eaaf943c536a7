#include "collectives/ring_allreduce.h"

#include <algorithm>

#include "collectives/schedule.h"
#include "common/kept.h"

namespace qsgd {
namespace {

struct Chunk {
  char* data;
  size_t count;
};

// Visits every tensor's part of every chunk: f(tensor, range, pointer into the chunk).
template <class F>
void for_each_part(std::vector<ReduceTensor>& tensors, const std::vector<Chunk>& chunks,
                   size_t element, F&& f) {
  const int size = static_cast<int>(chunks.size());
  for (int owner = 0; owner < size; ++owner) {
    char* at = chunks[static_cast<size_t>(owner)].data;
    for (ReduceTensor& tensor : tensors) {
      const Range range = owned(tensor.count, 1, tensor.id, size, owner);
      f(tensor, range, at);
      at += range.size() * element;
    }
  }
}

// Lays the chunks out one behind the other, each holding its part of every tensor. A tensor that
// travels alone stays where it is.
std::vector<Chunk> lay_out(std::vector<ReduceTensor>& tensors, int size, size_t element,
                           std::vector<char>& buffer) {
  std::vector<Chunk> chunks;
  if (tensors.size() == 1) {
    ReduceTensor& tensor = tensors.front();
    for (int owner = 0; owner < size; ++owner) {
      const Range range = owned(tensor.count, 1, tensor.id, size, owner);
      chunks.push_back({static_cast<char*>(tensor.out) + range.begin * element, range.size()});
    }
    return chunks;
  }
  size_t total = 0;
  for (const ReduceTensor& tensor : tensors) total += tensor.count;
  buffer.resize(total * element);
  char* at = buffer.data();
  for (int owner = 0; owner < size; ++owner) {
    size_t count = 0;
    for (const ReduceTensor& tensor : tensors) {
      count += owned(tensor.count, 1, tensor.id, size, owner).size();
    }
    chunks.push_back({at, count});
    at += count * element;
  }
  return chunks;
}

void exchange(Transport& transport, Tag tag, const Chunk& send, char* receive, size_t receive_count,
              size_t element) {
  const int size = transport.size();
  std::vector<RequestPtr> requests;
  if (receive_count > 0) {
    requests.push_back(transport.irecv((transport.rank() + size - 1) % size, tag, receive,
                                       receive_count * element));
  }
  if (send.count > 0) {
    requests.push_back(
        transport.isend((transport.rank() + 1) % size, tag, send.data, send.count * element));
  }
  transport.wait(requests);
}

}  // namespace

void ring_allreduce(Transport& transport, std::vector<ReduceTensor>& tensors,
                    const ReduceArgs& args) {
  const int size = transport.size(), rank = transport.rank();
  const size_t element = facts(args.dtype).size;
  KeptOnFailure<std::vector<char>> buffer;
  const std::vector<Chunk> chunks = lay_out(tensors, size, element, *buffer);
  for_each_part(tensors, chunks, element, [&](ReduceTensor& t, const Range& range, char* at) {
    const char* from = static_cast<const char*>(t.in) + range.begin * element;
    t.input_finite &= scale_copy(at, from, range.size(), args.dtype, args.prescale, 1);
  });

  const auto chunk = [&](int index) -> const Chunk& {
    return chunks[static_cast<size_t>((index + 2 * size) % size)];
  };
  size_t largest = 0;
  for (const Chunk& c : chunks) largest = std::max(largest, c.count);
  KeptOnFailure<std::vector<char>> incoming;
  if (size > 1) incoming->resize(largest * element);
  for (int step = 0; step < size - 1; ++step) {
    const Chunk& mine = chunk(rank - step - 2);
    exchange(transport, Tag::kData, chunk(rank - step - 1), incoming->data(), mine.count, element);
    reduce_into(mine.data, incoming->data(), mine.count, args.dtype, args.op);
  }
  for (int step = 0; step < size - 1; ++step) {
    const Chunk& next = chunk(rank - step - 1);
    exchange(transport, Tag::kData, chunk(rank - step), next.data, next.count, element);
  }

  const int divisor = args.op == ReduceOp::kAverage ? size : 1;
  for_each_part(tensors, chunks, element, [&](ReduceTensor& t, const Range& range, char* at) {
    char* to = static_cast<char*>(t.out) + range.begin * element;
    t.result_finite &= scale_copy(to, at, range.size(), args.dtype, args.postscale, divisor);
  });
}

}  // namespace qsgd
