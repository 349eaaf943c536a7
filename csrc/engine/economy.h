// Rank 0's decision how a tensor travels soonest on this machine, if the job wants to know.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/operation.h"
#include "planner/plan.h"

namespace qsgd {

// What becomes of codes that were asked for.
enum class Planning : uint8_t {
  kOff,     // they are used
  kAdvise,  // they are used; where they cost time, that is said once
  kChoose,  // they are used where that saves time
};

class Economy {
 public:
  Economy(int size, Planning planning) : size_(size), planning_(planning) {}

  // What decisions go by from now on; before, tensors travel as they were asked to. Codes that the
  // machine was not measured with are timed when they are asked for, with these threads.
  void set(Machine machine, PlanRequest request, Workers* workers);
  // Whether an operation that all ranks of the job submit is a reason to measure the machine.
  bool wants_machine(const Operation& operation) const;
  // How `count` elements travel for which `coding` was asked. `auto_bits`: or another of kAutoBits.
  std::optional<CodecSpec> bits_for(const std::optional<CodecSpec>& coding, bool auto_bits,
                                    size_t count);
  // `coding`, or nothing where it does not pay and somebody left that open.
  std::optional<CodecSpec> decide(const std::optional<CodecSpec>& coding, bool auto_bits,
                                  size_t count);
  // Of what is fused with nothing, so that the choice does not depend on what came when.
  Algorithm algorithm_for(const std::optional<CodecSpec>& coding, size_t count);
  // Of what all ranks now reduce together, `count` elements in a code that was asked for.
  void weigh(const CodecSpec& spec, size_t count);
  // What was decided since the last call, in sentences, each of them once.
  std::vector<std::string> take_news();

 private:
  // Of a code, or of float32.
  struct Known {
    std::optional<CodecSpec> spec;
    std::optional<std::optional<size_t>> least;       // from which count on it pays, if ever
    std::map<size_t, std::optional<CodecSpec>> bits;  // by count, where they are open
    std::map<size_t, Algorithm> algorithms;           // by count
    bool told = false;
  };

  Known& known(const std::optional<CodecSpec>& spec);
  std::optional<size_t> least_count(const CodecSpec& spec);
  std::optional<CodecSpec> choose_bits(const CodecSpec& spec, size_t count);
  void tell_of(const CodecSpec& spec);

  const int size_;
  const Planning planning_;
  std::optional<Machine> machine_;
  PlanRequest request_;
  Workers* workers_ = nullptr;
  std::vector<std::unique_ptr<Known>> known_;
  // Of the first coded reductions.
  struct Weighed {
    int reductions = 0;
    double elements = 0, coded_s = 0, exact_s = 0;
  } weighed_;
  std::vector<std::string> news_;
};

// Consecutive ranks that share each node, as the planner counts them; 1 when nodes differ.
int ranks_per_node(const SharedNode* node);

}  // namespace qsgd
