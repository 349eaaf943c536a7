// Executes agreed allreduces, and stores the state that persists between steps: how often a name
// was coded, its residual, and its coding error.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/allreduce.h"
#include "collectives/reduce.h"
#include "engine/entries.h"
#include "engine/residuals.h"
#include "engine/response.h"
#include "gpu/nccl.h"
#include "quant/codec.h"

namespace qsgd {

// Measured effect of compression on each tensor: cheap enough to be always on.
struct TensorQuality {
  std::optional<CodecSpec> coding;  // current code
  size_t count = 0;
  double code_bits = 0;   // per element, without scales
  size_t wire_bytes = 0;  // of one coded copy, without headers
  double nmse = 0;        // of this rank's codes: last, and summed over `reductions`
  double nmse_sum = 0;
  uint64_t reductions = 0;
};

class QualityLog {
 public:
  void record(const std::string& name, const std::optional<CodecSpec>& coding, DType dtype,
              const ReduceTensor& tensor);
  double last_nmse(const std::string& name) const;  // 0 when unknown
  std::map<std::string, TensorQuality> all() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, TensorQuality> by_name_;
};

enum class NonFinite { kError, kWarn, kPropagate };

struct ReducerConfig {
  uint64_t seed = 0;
  NonFinite nonfinite = NonFinite::kError;
  std::function<void(const std::string&)> log;
  std::string nccl_library;  // reduces uncoded device tensors; empty: done on the host
};

// When a collective ran, its algorithm, and its coding time.
struct Exchange {
  std::chrono::steady_clock::time_point begin;
  std::chrono::steady_clock::time_point end;
  const char* algorithm = "";
  double coding_s = 0;  // 0 if nothing was coded
};

class Reducer {
 public:
  // `ranks`: the communicator's ranks, as numbered in messages.
  Reducer(Communicator communicator, std::vector<int> ranks, ReducerConfig config);

  // Reduces the entries named by the response; its codes may have more bits than the operations
  // request. Returns an outcome for each entry.
  // The tensors are on `device` if codes_on() it; with `nccl` they may be anywhere, and it reduces
  // them: uncoded among all ranks, or within a node if sums_in_nodes(). Otherwise they are in host
  // memory.
  std::vector<Outcome> reduce(const Response& response, const std::vector<Entry*>& entries,
                              gpu::Device* device = nullptr, gpu::Nccl* nccl = nullptr);
  // Whether the response can be executed on tensors of `device`; null is no device.
  bool codes_on(const gpu::Device* device, const Response& response,
                const std::vector<Entry*>& entries) const;
  // Whether the response's algorithm sums within nodes without coding, so that this node's `nccl`
  // may do it.
  bool sums_in_nodes(const Response& response) const;

  const Exchange& last_exchange() const { return exchange_; }
  const QualityLog& quality() const { return quality_; }
  // Must not be used during a reduction.
  Residuals& residuals() { return residuals_; }
  // How often each name was coded, which determines the noise of its rounding.
  std::map<std::string, uint32_t>& steps() { return steps_; }

 private:
  using Inputs = std::vector<std::vector<char>>;

  std::vector<ReduceTensor> prepare(const std::vector<Entry*>& entries,
                                    const std::vector<CodecSpec>& codings, int owners,
                                    gpu::Device* device, Inputs& inputs);
  bool checks_finite(const Operation& operation) const;
  void record_quality(const std::vector<Entry*>& entries, const std::vector<CodecSpec>& codings,
                      const std::vector<ReduceTensor>& tensors);
  std::vector<Outcome> judge(const std::vector<Entry*>& entries,
                             const std::vector<ReduceTensor>& tensors);

  int owners_in(const AlgorithmTraits& traits) const;  // as in Residuals
  int size() const { return communicator_.transport.size(); }
  int rank() const { return communicator_.transport.rank(); }

  Communicator communicator_;
  const std::vector<int> ranks_;
  const ReducerConfig config_;
  std::map<std::string, uint32_t> steps_;
  Residuals residuals_;
  QualityLog quality_;
  Exchange exchange_;
  bool warned_ = false;  // of a non-finite result
};

}  // namespace qsgd
