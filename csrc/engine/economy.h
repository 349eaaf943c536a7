// Rank 0's choice of the fastest code for each tensor on this machine, if the job asks for it.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/operation.h"
#include "planner/plan.h"

namespace qsgd {

// Treatment of requested codes.
enum class Planning : uint8_t {
  kOff,     // they are used
  kAdvise,  // they are used; a warning is logged once if they cost time
  kChoose,  // they are used if they save time
};

class Economy {
 public:
  Economy(int size, Planning planning) : size_(size), planning_(planning) {}

  // Sets the basis of later decisions; before, tensors use the requested code. Codes that were not
  // measured are timed with these threads when they are first requested.
  void set(Machine machine, PlanRequest request, Workers* workers);
  // Whether an operation that all ranks of the job submit requires a measurement of the machine.
  bool wants_machine(const Operation& operation) const;
  // The code for `count` elements for which `coding` was requested: the fastest that `choice`
  // allows, if it pays at this count.
  std::optional<CodecSpec> code_for(const std::optional<CodecSpec>& coding, Choice choice,
                                    size_t count);
  // `coding`, or nothing if it does not pay at this count and the user or QSGD_PLANNER allows to
  // drop it.
  std::optional<CodecSpec> decide(const std::optional<CodecSpec>& coding, Choice choice,
                                  size_t count);
  // The algorithm for a tensor that is not fused with others, so that the choice does not depend on
  // timing.
  Algorithm algorithm_for(const std::optional<CodecSpec>& coding, size_t count);
  // Compares the predicted times of a reduction of `count` elements with a requested code and
  // without, for kAdvise.
  void weigh(const CodecSpec& spec, size_t count);
  // Sentences about decisions since the last call, each once.
  std::vector<std::string> take_news() { return std::exchange(news_, {}); }

 private:
  // Decisions for one code, or for float32.
  struct Known {
    std::optional<CodecSpec> spec;
    std::map<size_t, Algorithm> algorithms;  // by count
    struct Use {
      std::map<size_t, std::optional<CodecSpec>> chosen;  // by count
      std::vector<std::optional<CodecSpec>> reported;     // each outcome at its first count
    };
    std::array<Use, 3> uses;  // for each Choice
    Use& of(Choice choice) { return uses.at(static_cast<size_t>(choice)); }
  };

  Known& known(const std::optional<CodecSpec>& spec);
  std::optional<CodecSpec> choose_code(const CodecSpec& spec, Choice choice, size_t count);

  const int size_;
  const Planning planning_;
  std::optional<Machine> machine_;
  PlanRequest request_;
  Workers* workers_ = nullptr;
  std::vector<std::unique_ptr<Known>> known_;
  // Totals of the first coded reductions.
  struct Weighed {
    int reductions = 0;
    double elements = 0, coded_s = 0, exact_s = 0;
  } weighed_;
  std::vector<std::string> news_;
};

}  // namespace qsgd
