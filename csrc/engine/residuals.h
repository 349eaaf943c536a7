// Error feedback's residuals: the part of each tensor that coding has not sent, to be added later.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/schedule.h"
#include "gpu/device.h"
#include "quant/codec.h"

namespace qsgd {

// Error feedback's residual of one tensor: on the host, or on the device that codes it.
class Owed {
 public:
  size_t size() const { return there_.data() != nullptr ? count_ : here_.size(); }
  bool empty() const { return size() == 0; }

  // Moves the values to the host.
  std::vector<float>& on_host();
  // Moves the values to the device (null: to the host). Called by the thread that drives the
  // engine.
  float* on(gpu::Device* device);
  std::vector<float> values() const;
  void clear();

 private:
  std::vector<float> here_;
  gpu::DeviceMemory there_;  // if allocated, it has the values
  size_t count_ = 0;
};

// Not thread-safe: used by the engine during a reduction, and by other threads between reductions.
class Residuals {
 public:
  using Log = std::function<void(const std::string&)>;

  // `owners` of the functions below: the number of ranks of each node that code for other nodes; 0
  // if all ranks exchange with all; kNoSums if no rank codes sums.
  static constexpr int kNoSums = -1;

  Residuals(const Communicator& communicator, Log log)
      : communicator_(communicator), log_(std::move(log)) {}

  // Gives the tensor its residuals for a reduction with buckets of `bucket` elements and result
  // scale * (sum of inputs). They are zero for a new name, and are moved to the `device` that codes
  // them; null: the host. Returns what must be added to this rank's input because its codes cannot
  // include it, in the input's units; usually empty.
  std::vector<float> attach(const std::string& name, uint32_t bucket, double scale, int owners,
                            gpu::Device* device, ReduceTensor& tensor);
  // For a tensor that is not coded from now on: deletes the residual, and returns what must be
  // added to this rank's input, in the input's units; empty if there is no residual.
  std::vector<float> take(const std::string& name, double scale, const ReduceTensor& tensor);
  bool has(const std::string& name) const { return by_name_.count(name) != 0; }
  // Deletes the residual of one name, so that NaN and Inf do not persist.
  void forget(const std::string& name) { by_name_.erase(name); }

  // Number of elements of each tensor with a residual.
  std::map<std::string, size_t> counts() const;
  // This rank's share, in the result's units; the sum over the ranks is the residual.
  std::vector<float> share(const std::string& name) const;
  // Replaces all residuals. Every rank passes the same values, in the result's units.
  void restore(std::map<std::string, std::vector<float>> owed);

 private:
  struct Residual {
    Owed worker;                  // of this rank's codes, in its input's units
    Owed owner;                   // of the sums that this rank codes, in the result's units
    std::vector<float> restored;  // equal on all ranks, in the result's units; until first used
    uint32_t id = 0;
    uint32_t bucket = 0;
    double scale = 1;
    int owners = 0;
    size_t count() const { return restored.empty() ? worker.size() : restored.size(); }
  };
  // The elements whose residual this rank's own codes can include, and how many ranks share each;
  // a single rank codes nothing.
  struct Covered {
    Range range;
    int ranks;
  };
  Covered covered(size_t count, uint32_t bucket, uint32_t id, int owners) const;
  // Of `count` elements of tensor `id`, those whose sums this rank codes.
  Range coded_sums(size_t count, uint32_t bucket, uint32_t id, int owners) const;
  // Moves all residuals to `worker`, for tensor `id` reduced with `scale` in buckets of `bucket`
  // elements.
  void gather(Residual& residual, double scale, uint32_t bucket, uint32_t id, int owners) const;
  static void move_to_owner(Residual& residual, const Range& mine);
  // Removes from `worker` what this rank's codes cannot include, and returns it.
  std::vector<float> take_beyond(Residual& residual, uint32_t bucket, uint32_t id,
                                 int owners) const;
  // Warns, once per name, if not.
  bool fits(const std::string& name, const Residual& residual, size_t count);
  void warn_of_many(const std::string& name) const;

  int rank() const { return communicator_.transport.rank(); }

  const Communicator communicator_;
  const Log log_;
  std::map<std::string, Residual> by_name_;
  std::set<std::string> misfits_;
};

}  // namespace qsgd
