// Detection of dead ranks within seconds: every rank has a TCP connection to its parent and to each
// child in the tree, and a connection that closes without a goodbye means that the peer's process
// has died.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/transport.h"

namespace qsgd {

class Lifeline {
 public:
  struct Peer {
    int fd;  // a connected socket; closed by this class
    int rank;
    std::string label;  // "host nid0001, pid 4242"
  };
  // At the first loss, raises `abort` with a sentence that names the dead rank, and calls `on_loss`
  // unless it is null; both by this class's thread. If the program has not noticed the error within
  // `grace_s`, the sentence is printed to stderr and the process ends, so that no rank computes in
  // vain.
  Lifeline(int rank, std::vector<Peer> peers, std::shared_ptr<AbortFlag> abort,
           std::function<void()> on_loss, double grace_s);
  ~Lifeline();
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

  // Informs the other ranks that this one has failed, and why.
  void announce(const std::string& reason);
  // Ends the monitoring. After a goodbye, the others do not treat the closed connections as a loss.
  void close(bool goodbye);

 private:
  void watch();
  // Returns false if the peer has closed or sent a goodbye; sets `loss` unless it sent a goodbye.
  bool read_from(const Peer& peer, std::string& loss);
  void send_to_all(char type, const std::string& text, int except_rank);
  void enforce(const std::string& loss);

  const int rank_;
  std::vector<Peer> peers_;
  const std::shared_ptr<AbortFlag> abort_;
  const std::function<void()> on_loss_;
  const double grace_s_;
  int wake_[2];  // a pipe: written to end the thread
  std::mutex send_mutex_;
  std::thread thread_;
};

}  // namespace qsgd
