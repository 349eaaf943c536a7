// Notices within seconds that a rank has died: every rank holds a TCP connection to rank 0, and a
// connection that closes without a goodbye belonged to a process that was killed.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace qsgd {

class Lifeline {
 public:
  struct Peer {
    int fd;  // a connected socket; closed by this class
    int rank;
    std::string label;  // "host nid0001, pid 4242"
  };
  // `on_loss` is called once, from this class's thread, with a sentence that names the lost rank.
  // `noticed` tells whether the program has learned of it; if not within the grace period, the
  // sentence goes to stderr and the process ends, so that no rank computes on for nothing.
  Lifeline(int rank, std::vector<Peer> peers, std::function<void(const std::string&)> on_loss,
           std::function<bool()> noticed, double grace_s);
  ~Lifeline();
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

  // Tells the other ranks that this one cannot go on, and why.
  void announce(const std::string& reason);
  // Ends the watch; after a goodbye, closing is no loss to the others.
  void close(bool goodbye);

 private:
  void watch();
  // False when the peer has gone or said goodbye; fills `loss` when that was a loss.
  bool read_from(const Peer& peer, std::string& loss);
  void send_to_all(char type, const std::string& text, int except_rank);
  void enforce(const std::string& loss);

  const int rank_;
  std::vector<Peer> peers_;
  const std::function<void(const std::string&)> on_loss_;
  const std::function<bool()> noticed_;
  const double grace_s_;
  int wake_[2];  // a pipe: written to end the thread
  std::mutex send_mutex_;
  std::thread thread_;
};

}  // namespace qsgd
