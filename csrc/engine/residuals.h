// Error feedback's memory: what coding has left unsent of each tensor, and is owed to its result.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "collectives/reduce.h"
#include "collectives/schedule.h"
#include "engine/owed.h"
#include "quant/codec.h"

namespace qsgd {

// Not thread-safe: the engine uses it while a reduction runs, its users while none does.
class Residuals {
 public:
  using Log = std::function<void(const std::string&)>;

  // Of `count` elements of tensor `id`, those whose sums this rank codes, where so many ranks of
  // each node code for other nodes; 0 where all ranks exchange with all.
  using Owned = std::function<Range(size_t count, uint32_t bucket, uint32_t id, int owners)>;
  // The elements whose residual reaches this rank's own codes, and how many ranks share each.
  struct Paid {
    Range range;
    int payers;
  };
  using Pays = std::function<Paid(size_t count, uint32_t bucket, uint32_t id, int owners)>;

  Residuals(int rank, Owned owned, Pays pays, Log log)
      : rank_(rank), owned_(std::move(owned)), pays_(std::move(pays)), log_(std::move(log)) {}

  // Lends the tensor its residuals for a reduction in buckets of `bucket`, which gives
  // scale * (sum of inputs); they are zero when the name is new. They lie where `device` codes with
  // them; null: on the host.
  void lend(const std::string& name, uint32_t bucket, double scale, int owners, gpu::Device* device,
            ReduceTensor& tensor);
  // For a tensor that travels exactly from now on: adds what is owed to this rank's input, so that
  // it is paid with this reduction, and forgets it. Returns the input to use instead, or nothing
  // when nothing is owed.
  std::vector<char> settle(const std::string& name, DType dtype, double scale,
                           const ReduceTensor& tensor);
  bool has(const std::string& name) const { return debts_.count(name) != 0; }
  // Forgets what is owed to one name: NaN and Inf must not live on.
  void forget(const std::string& name) { debts_.erase(name); }

  // Elements of each tensor that is owed something.
  std::map<std::string, size_t> counts() const;
  // This rank's share, in the result's units; the ranks' shares add up to what is owed.
  std::vector<float> share(const std::string& name) const;
  // Replaces everything. Every rank passes the same: what is owed, in the result's units.
  void restore(std::map<std::string, std::vector<float>> owed);

 private:
  struct Debt {
    Owed worker;                  // of this rank's codes, in its input's units; else zero
    Owed owner;                   // of the sums that this rank codes, in the result's units
    std::vector<float> restored;  // equal on every rank, in the result's units; until first used
    uint32_t id = 0;
    uint32_t bucket = 0;
    double scale = 1;
    int owners = 0;
    size_t count() const { return restored.empty() ? worker.size() : restored.size(); }
  };
  // Moves all into `worker`, for tensor `id` that is reduced with `scale` in buckets of `bucket`.
  void gather(Debt& debt, double scale, uint32_t bucket, uint32_t id, int owners) const;
  static void move_to_owner(Debt& debt, const Range& mine);
  bool fits(const std::string& name, const Debt& debt, size_t count) const;
  void warn_of_many(const std::string& name) const;

  const int rank_;
  const Owned owned_;
  const Pays pays_;
  const Log log_;
  std::map<std::string, Debt> debts_;
};

}  // namespace qsgd
