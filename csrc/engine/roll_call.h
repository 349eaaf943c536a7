// Names the ranks that do not come to init(), where the others wait for them inside MPI.
//
// A rank that never calls init() leaves the others in MPI_Init or in the first collective, and MPI
// says nothing. So each rank holds a socket with a name of its own while it waits there; the kernel
// lists the names, takes them away when a process ends, and keeps no file. All this is for the
// ranks of one host; of others, MPI alone could tell.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace qsgd {

class RollCall {
 public:
  struct Seat {
    std::string launch;  // a word that only the ranks of one launch on one host share
    std::string host;
    int rank;
    int ranks;
    int local_rank;
    int local_size;
  };

  // Starts to wait. Every `warning_s` seconds the first of the ranks that are here says on stderr
  // who is not; after `shutdown_s` seconds, unless that is 0, the process ends with exit code 1.
  RollCall(Seat seat, double warning_s, double shutdown_s);
  ~RollCall();
  RollCall(const RollCall&) = delete;
  RollCall& operator=(const RollCall&) = delete;

  // Ends the wait: all ranks have come, or this one gives up. Harmless when called again.
  void end();

 private:
  void watch();
  std::string name_of(int local_rank) const;
  std::set<int> present() const;
  std::string who_is_missing(const std::set<int>& here, double waited_s) const;

  const Seat seat_;
  const double warning_s_;
  const double shutdown_s_;
  int socket_;
  bool ended_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace qsgd
