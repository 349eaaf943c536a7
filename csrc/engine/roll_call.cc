#include "engine/roll_call.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "common/listed.h"
#include "common/thread_name.h"

namespace qsgd {
namespace {

// /proc/net/unix shows an abstract name with @ for its leading zero byte.
constexpr const char* kSockets = "/proc/net/unix";
constexpr int kChecksPerWarning = 4;
constexpr const char* kPrefix = "qsgd-init-";

int hold_name(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t size = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), size);
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  // The name is taken if this process calls init() twice: then there is nothing to report.
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0) return fd;
  close(fd);
  return -1;
}

void print_line(const std::string& text) {
  // A single write, so that lines of ranks do not mix.
  const std::string line = text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

RollCall::RollCall(RankPlace place, double warning_s, double shutdown_s)
    : place_(std::move(place)),
      warning_s_(warning_s),
      shutdown_s_(shutdown_s),
      socket_(hold_name(name_of(place_.local_rank))) {
  thread_ = std::thread([this] { watch(); });
}

RollCall::~RollCall() { end(); }

void RollCall::end() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (socket_ >= 0) close(std::exchange(socket_, -1));
}

void RollCall::watch() {
  name_thread("qsgd-roll-call");
  using Clock = std::chrono::steady_clock;
  const auto began = Clock::now();
  const auto after = [began](double s) {
    return began + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
  };
  const auto within = [this](double s) { return shutdown_s_ > 0 ? std::min(s, shutdown_s_) : s; };
  double warn_s = warning_s_ > 0 ? within(warning_s_) : shutdown_s_;
  // Looks more often than it warns: a rank that has called init() and given up since is not
  // missing.
  const double check_s = warn_s / kChecksPerWarning;
  double next_s = check_s;
  std::set<int> here;
  std::unique_lock<std::mutex> lock(mutex_);
  while (check_s > 0 && !changed_.wait_until(lock, after(next_s), [this] { return ended_; })) {
    here.merge(present());
    if (next_s < warn_s) {
      next_s = std::min(next_s + check_s, warn_s);
      continue;
    }
    const bool over = shutdown_s_ > 0 && next_s >= shutdown_s_;
    if (over || *here.begin() == place_.local_rank) print_line(describe_missing(here, next_s));
    if (over) {
      print_line("qsgd-hpc: rank " + std::to_string(place_.rank) +
                 " ends: it has waited as long as QSGD_STALL_SHUTDOWN_S allows");
      _exit(1);
    }
    warn_s = within(warn_s + warning_s_);
    next_s = std::min(next_s + check_s, warn_s);
  }
}

std::string RollCall::name_of(int local_rank) const {
  return kPrefix + place_.launch + "." + std::to_string(local_rank);
}

std::set<int> RollCall::present() const {
  std::unordered_map<std::string, int> names;
  for (int r = 0; r < place_.local_size; ++r) names[name_of(r)] = r;
  std::set<int> found{place_.local_rank};
  std::ifstream sockets(kSockets);
  std::string line;
  while (std::getline(sockets, line)) {
    const size_t at = line.find('@');
    if (at == std::string::npos) continue;
    const auto known = names.find(line.substr(at + 1));
    if (known != names.end()) found.insert(known->second);
  }
  return found;
}

std::string RollCall::describe_missing(const std::set<int>& here, double waited_s) const {
  std::set<int> missing;
  for (int r = 0; r < place_.local_size; ++r) {
    if (here.count(r) == 0) missing.insert(r);
  }
  const bool one_host = place_.local_size == place_.ranks;
  std::ostringstream text;
  text << "qsgd-hpc: warning: rank " << place_.rank << " has waited " << waited_s
       << " s in init() for the other ranks: ";
  if (!missing.empty()) {
    text << (one_host ? "" : "local ") << (missing.size() == 1 ? "rank " : "ranks ")
         << listed(missing) << " of the " << place_.local_size << " on host " << place_.host
         << (missing.size() == 1 ? " has" : " have")
         << " not called it. Every rank must call init(), as early as the others: see whether one "
            "has ended, or is busy with data";
  } else if (one_host) {
    text << "all " << place_.ranks << " have called it, but MPI does not connect them. "
         << "Try the MPI alone: python -m mpi4py.bench helloworld";
  } else {
    text << "all " << place_.local_size << " on host " << place_.host << " have called it, of "
         << place_.ranks
         << " in all. Look at the output of ranks on the other hosts; a host where none "
         << "has called it prints nothing";
  }
  return text.str();
}

}  // namespace qsgd
