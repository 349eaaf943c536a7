#include "collectives/bucket_coder.h"

#include <algorithm>
#include <limits>
#include <string>

#include "collectives/schedule.h"
#include "common/error.h"

namespace qsgd {
namespace {

constexpr size_t kAlignment = 16;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct Alike {
  std::optional<CodecSpec> spec;
  std::vector<ReduceTensor> tensors;
  std::vector<BucketPlace> places;
};

std::vector<Alike> sort_by_code(const std::vector<BucketTensor>& tensors) {
  std::vector<Alike> sorts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const BucketTensor& t = tensors[i];
    auto sort = std::find_if(sorts.begin(), sorts.end(),
                             [&](const Alike& known) { return known.spec == t.spec; });
    if (sort == sorts.end()) sort = sorts.insert(sort, Alike{t.spec, {}, {}});
    ReduceTensor tensor{nullptr, nullptr, t.count, t.id, 0};
    tensor.residual = t.residual;
    tensor.owner_residual = t.owner_residual;
    tensor.spec = t.spec ? *t.spec : plain_cut();
    sort->tensors.push_back(tensor);
    sort->places.push_back({t.at, i});
  }
  return sorts;
}

}  // namespace

std::pair<size_t, size_t> owned_elements(size_t count, const CodecSpec& spec, uint32_t id, int size,
                                         int rank) {
  const Range range = owned(count, spec.bucket, id, size, rank);
  return {range.begin, range.end};
}

BucketCoder::BucketCoder(const std::vector<BucketTensor>& tensors, DType dtype, uint64_t seed,
                         int rank, int size, size_t limit, Workers* workers)
    : tensors_(tensors.size()), rank_(rank), size_(size) {
  if (!facts(dtype).floating) {
    throw usage_error(std::string("a bucket of ") + facts(dtype).name + " cannot be coded");
  }
  if (limit == 0) limit = std::numeric_limits<size_t>::max();
  ReduceArgs args;
  args.dtype = dtype;
  args.op = ReduceOp::kAverage;
  for (Alike& sort : sort_by_code(tensors)) {
    if (sort.spec) {
      parts_.push_back(coded_part(std::move(sort.tensors), std::move(sort.places), args, seed, rank,
                                  size, limit, workers));
    } else {
      parts_.push_back(plain_part(sort.tensors, std::move(sort.places), dtype, rank, size, limit));
    }
    for (int owner = 0; owner < size; ++owner) {
      waves_ = std::max(waves_, parts_.back()->waves(owner));
    }
  }
}

// Calls use(part, offset) for the parts with bytes in the owner's message.
template <class Use>
void BucketCoder::each_part(size_t wave, int owner, const Use& use) {
  size_t at = 0;
  for (const auto& part : parts_) {
    const size_t bytes = part->bytes(wave, owner);
    if (bytes > 0) use(*part, at);
    at += aligned(bytes);
  }
}

size_t BucketCoder::bytes(size_t wave, int owner) const {
  size_t all = 0;
  for (const auto& part : parts_) all += aligned(part->bytes(wave, owner));
  return all;
}

void BucketCoder::begin(void* bucket, const std::vector<uint32_t>& steps) {
  if (steps.size() != tensors_) {
    throw usage_error(std::to_string(steps.size()) + " steps for a bucket of " +
                      std::to_string(tensors_) + " tensors");
  }
  for (const auto& part : parts_) part->begin(static_cast<char*>(bucket), steps);
}

void BucketCoder::encode(size_t wave, uint8_t* messages) {
  for (int owner = 0; owner < size_; ++owner) {
    if (owner == rank_) continue;
    each_part(wave, owner,
              [&](BucketPart& part, size_t at) { part.encode(wave, owner, messages + at); });
    messages += bytes(wave, owner);
  }
}

void BucketCoder::reduce(size_t wave, const uint8_t* messages, uint8_t* result) {
  const size_t stride = bytes(wave, rank_);
  each_part(wave, rank_, [&](BucketPart& part, size_t at) {
    Terms terms(static_cast<size_t>(size_), kOwn);
    size_t sender = 0;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) terms[static_cast<size_t>(rank)] = messages + sender++ * stride + at;
    }
    part.reduce(wave, terms, result + at);
  });
}

void BucketCoder::decode(size_t wave, const uint8_t* results, size_t stride) {
  for (int owner = 0; owner < size_; ++owner) {
    if (owner == rank_) continue;
    const uint8_t* const message = results + static_cast<size_t>(owner) * stride;
    each_part(wave, owner,
              [&](BucketPart& part, size_t at) { part.decode(wave, owner, message + at); });
  }
}

Quality BucketCoder::quality() const {
  Quality all;
  for (const auto& part : parts_) all += part->quality();
  return all;
}

}  // namespace qsgd
