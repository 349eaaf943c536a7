// Names the ranks that have not called init() while the others wait for them inside MPI.
//
// A rank that never calls init() leaves the others in MPI_Init or in the first collective, and MPI
// prints nothing. Therefore each waiting rank holds a socket with a unique abstract name; the
// kernel lists these names, removes them when a process ends, and creates no file. This covers the
// ranks of one host; only MPI could report on others.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace qsgd {

class RollCall {
 public:
  struct RankPlace {
    std::string launch;  // an identifier of this launch on this host
    std::string host;
    int rank;
    int ranks;
    int local_rank;
    int local_size;
  };

  // Starts to wait. Every `warning_s` seconds, the lowest waiting rank of the host prints the
  // missing ranks to stderr; after `shutdown_s` seconds (0: never), the process ends with exit code
  // 1.
  RollCall(RankPlace place, double warning_s, double shutdown_s);
  ~RollCall();
  RollCall(const RollCall&) = delete;
  RollCall& operator=(const RollCall&) = delete;

  // Ends the wait: init() has completed, or this rank gives up. May be called again.
  void end();

 private:
  void watch();
  std::string name_of(int local_rank) const;
  std::set<int> present() const;
  std::string describe_missing(const std::set<int>& here, double waited_s) const;

  const RankPlace place_;
  const double warning_s_;
  const double shutdown_s_;
  int socket_;
  bool ended_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace qsgd
