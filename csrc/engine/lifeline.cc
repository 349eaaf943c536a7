#include "engine/lifeline.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "common/error.h"
#include "common/thread_name.h"

namespace qsgd {
namespace {

constexpr char kGoodbye = 'G';
constexpr char kFailure = 'F';
constexpr size_t kMaxText = 60000;  // its length is sent in 16 bits

bool read_all(int fd, void* into, size_t size) {
  char* at = static_cast<char*>(into);
  while (size > 0) {
    const ssize_t got = recv(fd, at, size, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    size -= static_cast<size_t>(got);
  }
  return true;
}

void write_all(int fd, const char* from, size_t size) {
  while (size > 0) {
    const ssize_t sent = send(fd, from, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return;  // the peer has closed; reading detects it
    from += sent;
    size -= static_cast<size_t>(sent);
  }
}

}  // namespace

Lifeline::Lifeline(int rank, std::vector<Peer> peers, std::shared_ptr<AbortFlag> abort,
                   std::function<void()> on_loss, double grace_s)
    : rank_(rank),
      peers_(std::move(peers)),
      abort_(std::move(abort)),
      on_loss_(std::move(on_loss)),
      grace_s_(grace_s) {
  if (pipe2(wake_, O_CLOEXEC) != 0) {
    throw internal_error(std::string("cannot create a pipe: ") + std::strerror(errno));
  }
  thread_ = std::thread([this] { watch(); });
}

Lifeline::~Lifeline() {
  close(false);
  ::close(wake_[0]);
  ::close(wake_[1]);
}

void Lifeline::announce(const std::string& reason) { send_to_all(kFailure, reason, rank_); }

void Lifeline::close(bool goodbye) {
  if (!thread_.joinable()) return;
  if (goodbye) send_to_all(kGoodbye, "", rank_);
  const char end = 0;
  while (::write(wake_[1], &end, 1) < 0 && errno == EINTR) {
  }
  thread_.join();
  for (const Peer& peer : peers_) ::close(peer.fd);
}

void Lifeline::send_to_all(char type, const std::string& text, int except_rank) {
  const auto size = static_cast<uint16_t>(std::min(text.size(), kMaxText));
  std::string message(1, type);
  message.append(reinterpret_cast<const char*>(&size), sizeof size);
  message.append(text, 0, size);
  const std::lock_guard<std::mutex> lock(send_mutex_);
  for (const Peer& peer : peers_) {
    if (peer.rank != except_rank) write_all(peer.fd, message.data(), message.size());
  }
}

bool Lifeline::read_from(const Peer& peer, std::string& loss) {
  char type = 0;
  uint16_t size = 0;
  std::string text;
  bool whole = read_all(peer.fd, &type, 1) && read_all(peer.fd, &size, sizeof size);
  if (whole) {
    text.resize(size);
    whole = read_all(peer.fd, text.data(), size);
  }
  if (!whole) {
    loss = "rank " + std::to_string(peer.rank) + " (" + peer.label +
           ") died: its process ended without leaving the job. Was it killed (out of memory, by "
           "hand, by the scheduler) or did it crash? Look at that rank's own output.";
    return false;
  }
  if (type == kFailure) loss = text;
  return type != kGoodbye && loss.empty();
}

void Lifeline::watch() {
  name_thread("qsgd-lifeline");
  std::vector<pollfd> fds;
  for (const Peer& peer : peers_) fds.push_back({peer.fd, POLLIN, 0});
  fds.push_back({wake_[0], POLLIN, 0});
  while (true) {
    if (poll(fds.data(), fds.size(), -1) < 0) continue;  // EINTR
    if (fds.back().revents != 0) return;
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (fds[i].revents == 0) continue;
      std::string loss;
      if (!read_from(peers_[i], loss)) fds[i].fd = -1;  // poll ignores it from now on
      if (loss.empty()) continue;
      send_to_all(kFailure, loss, peers_[i].rank);  // informs the rest of the tree
      abort_->raise(loss);
      if (on_loss_) on_loss_();
      return enforce(loss);
    }
  }
}

void Lifeline::enforce(const std::string& loss) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(grace_s_ * 1000));
  pollfd wake{wake_[0], POLLIN, 0};
  while (Clock::now() < end) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    if (poll(&wake, 1, static_cast<int>(left.count()) + 1) > 0) return;
  }
  if (abort_->noticed()) return;
  const std::string line = "qsgd-hpc: rank " + std::to_string(rank_) + " ends because " + loss +
                           " (This rank called no collective in the meantime.)\n";
  (void)!::write(STDERR_FILENO, line.data(), line.size());
  _exit(1);
}

}  // namespace qsgd
