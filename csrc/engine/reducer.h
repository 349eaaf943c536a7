// Carries out allreduces that all ranks have agreed on, and keeps what lasts from one step to the
// next: how often a name was coded, what error feedback owes it, and how well it was coded.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "collectives/allreduce.h"
#include "engine/entries.h"
#include "engine/nonfinite.h"
#include "engine/quality.h"
#include "engine/residuals.h"
#include "engine/response.h"
#include "gpu/nccl.h"

namespace qsgd {

struct ReducerConfig {
  uint64_t seed = 0;
  NonFinite nonfinite = NonFinite::kError;
  std::function<void(const std::string&)> log;
  std::string nccl_library;
};

// When a collective ran, by which algorithm, and how long it coded.
struct Exchange {
  std::chrono::steady_clock::time_point begin;
  std::chrono::steady_clock::time_point end;
  const char* algorithm = "";
  double coding_s = 0;  // 0 where nothing was
};

class Reducer {
 public:
  // `ranks` are the communicator's, as messages name them.
  Reducer(Communicator communicator, std::vector<int> ranks, ReducerConfig config);

  // Reduces the entries that the answer names together, as it says; a code may have more bits than
  // an operation asks for. An outcome for each.
  // `device` has all of them, and codes_on() it; or `nccl` carries them, wherever they are: without
  // codes among all ranks, or where it sums_in_nodes() within one. Else they are in the processor's
  // memory.
  std::vector<Outcome> reduce(const Response& response, const std::vector<Entry*>& entries,
                              gpu::Device* device = nullptr, gpu::Nccl* nccl = nullptr);
  // Whether the answer can be carried out on tensors that lie there; null is no device.
  bool codes_on(const gpu::Device* device, const Response& response,
                const std::vector<Entry*>& entries) const;
  // Whether the answer's algorithm sums within nodes without coding, so that `nccl` of this node
  // may.
  bool sums_in_nodes(const Response& response) const;

  const Exchange& last_exchange() const { return exchange_; }
  const QualityLog& quality() const { return quality_; }
  // Not while a reduction runs.
  Residuals& residuals() { return residuals_; }
  // How often each name was coded, which the noise of its rounding follows from.
  std::map<std::string, uint32_t>& steps() { return steps_; }

 private:
  using Settled = std::vector<std::vector<char>>;

  std::vector<ReduceTensor> prepare(const std::vector<Entry*>& entries,
                                    const std::vector<CodecSpec>& codings, int owners,
                                    gpu::Device* device, Settled& settled);
  bool looks_at(const Operation& operation) const;
  void take_note(const std::vector<Entry*>& entries, const std::vector<CodecSpec>& codings,
                 const std::vector<ReduceTensor>& tensors);
  std::vector<Outcome> judge(const std::vector<Entry*>& entries,
                             const std::vector<ReduceTensor>& tensors);

  Residuals::Paid paid_here(size_t count, uint32_t bucket, uint32_t id, int owners) const;
  // The elements of a tensor whose sums this rank codes.
  Range coded_here(size_t count, uint32_t bucket, uint32_t id, int owners) const;
  int size() const { return communicator_.transport.size(); }
  int rank() const { return communicator_.transport.rank(); }

  Communicator communicator_;
  const std::vector<int> ranks_;
  const ReducerConfig config_;
  std::map<std::string, uint32_t> steps_;
  Residuals residuals_;
  QualityLog quality_;
  Exchange exchange_;
  bool warned_ = false;  // of a result that is not finite
};

}  // namespace qsgd
