// What rank 0 does to agree on a step's tensors: all ranks' agreements, driven by one thread.
//
//   core=$(find csrc -name '*.cc' | grep -v -e bindings -e jax -e gpu -e tensorflow)
//   g++ -std=c++17 -O2 -ffp-contract=off -Icsrc benchmarks/agreement/drive.cc $core -o drive -ldl
//   ./drive RANKS RANKS_PER_NODE TENSORS FAN_OUT STEPS
//
// A fan-out of as many as there are ranks, each a node of its own, is a star. Prints its arguments,
// the messages that rank 0 reads in a step, the most that another rank reads, and rank 0's time for
// a step in us, least and median. Messages are copied in memory: MPI's part is not in it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "engine/agreement.h"
#include "transport/thread_transport.h"

using namespace qsgd;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUp = 3;  // until every name travels as a number
constexpr int kTurns = 40;  // a mailbox without room sends by a way that is looked at now and then

struct Rank {
  Rank(const std::shared_ptr<ThreadWorld>& world, int rank, int per_node, int tensors, int fan_out)
      : transport(world, rank), timeline(rank) {
    if (per_node > 1) node = make_thread_node(*world, transport, per_node);
    Agreement::Config config;
    config.stall_warning_s = 0;
    config.fan_out = fan_out;
    agreement = std::make_unique<Agreement>(transport, node.get(), timeline, config);
    for (int i = 0; i < tensors; ++i) {
      const auto operation = std::make_shared<Operation>();
      operation->name = "model.layer" + std::to_string(i) + ".weight";
      operation->shape = {16};
      operation->lasting = true;
      operations.push_back(operation);
    }
  }

  void submit() {
    std::vector<Submission> all;
    for (const OperationPtr& operation : operations) all.push_back({operation});
    agreement->submit(all);
  }

  void hear() {
    for (int i = 0; i < kTurns && agreement->agreed().empty(); ++i) agreement->make_progress();
  }

  void take_agreed() {
    if (!agreement->take_agreed().empty()) return;
    std::fprintf(stderr, "rank %d was told nothing\n", transport.rank());
    std::_Exit(1);
  }

  ThreadTransport transport;
  Timeline timeline;
  std::unique_ptr<SharedNode> node;
  std::unique_ptr<Agreement> agreement;
  std::vector<OperationPtr> operations;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const int size = std::atoi(argv[1]), per_node = std::atoi(argv[2]), tensors = std::atoi(argv[3]);
  const int fan_out = std::atoi(argv[4]), steps = std::atoi(argv[5]);
  const auto world = std::make_shared<ThreadWorld>(size);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.push_back(std::make_unique<Rank>(world, r, per_node, tensors, fan_out));
  }
  std::vector<uint64_t> before(ranks.size());
  std::vector<double> times_us;
  for (int step = 0; step < kWarmUp + steps; ++step) {
    if (step == kWarmUp) {
      for (int r = 0; r < size; ++r) before[r] = ranks[r]->agreement->messages_heard();
    }
    for (int r = size - 1; r > 0; --r) {  // children before their parents
      ranks[r]->hear();
      ranks[r]->submit();
    }
    const auto start = Clock::now();
    ranks[0]->submit();
    ranks[0]->hear();
    const std::chrono::duration<double, std::micro> spent = Clock::now() - start;
    if (step >= kWarmUp) times_us.push_back(spent.count());
    for (int r = 0; r < size; ++r) {
      if (r > 0) ranks[r]->hear();
      ranks[r]->take_agreed();
    }
  }
  std::vector<double> heard;
  for (int r = 0; r < size; ++r) {
    heard.push_back(double(ranks[r]->agreement->messages_heard() - before[r]) / steps);
  }
  std::sort(times_us.begin(), times_us.end());
  std::printf("%d %d %d %d %d %g %g %.1f %.1f\n", size, per_node, tensors, fan_out, steps, heard[0],
              *std::max_element(heard.begin() + 1, heard.end()), times_us.front(),
              times_us[times_us.size() / 2]);
  std::fflush(stdout);
  std::_Exit(0);  // no goodbyes among engines that have none
}
