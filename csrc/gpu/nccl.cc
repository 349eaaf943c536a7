#include "gpu/nccl.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <utility>

#include "collectives/exchange.h"
#include "common/error.h"
#include "common/kept.h"
#include "gpu/library.h"

namespace qsgd::gpu {
namespace {

constexpr int kSuccess = NcclCalls::kSuccess, kInProgress = NcclCalls::kInProgress;

using Clock = std::chrono::steady_clock;
// Timeouts for ranks that do not join, and for ranks that do not close.
constexpr std::chrono::seconds kJoining{120}, kClosing{10};

// Information that ranks exchange before they begin.
struct Vote {
  char against[200] = {};  // why this rank cannot; empty: it can
  char host[64] = {};      // as NCCL distinguishes hosts: by name and boot, or NCCL_HOSTID
  char boot[40] = {};
  char device[kIdentity] = {};

  void refuse(const std::string& why) { std::snprintf(against, sizeof against, "%s", why.c_str()); }
};

Vote vote_of(const NcclCalls* calls, const Device* device, const std::string& why) {
  Vote vote;
  if (const char* const given = std::getenv("NCCL_HOSTID")) {
    std::snprintf(vote.host, sizeof vote.host, "%s", given);
  } else {
    gethostname(vote.host, sizeof vote.host - 1);
    std::ifstream("/proc/sys/kernel/random/boot_id").getline(vote.boot, sizeof vote.boot);
  }
  if (calls == nullptr) {
    vote.refuse(why);
  } else if (device == nullptr) {
    vote.refuse("it has had no tensor in a GPU's memory");
  } else {
    device->identify(vote.device);
  }
  return vote;
}

// Empty if all ranks can; else which one cannot, and why: equal on all ranks.
std::string objection(Transport& transport, const std::vector<int>& ranks, const Vote& own) {
  const auto size = static_cast<size_t>(transport.size());
  const KeptOnFailure<std::vector<Vote>> votes{std::vector<Vote>(size)};
  allgatherv(transport, &own, votes->data(), std::vector<size_t>(size, sizeof(Vote)));
  std::map<std::string, int> owners;
  for (size_t r = 0; r < size; ++r) {
    const Vote& vote = (*votes)[r];
    const std::string rank = "rank " + std::to_string(ranks[r]);
    if (vote.against[0] != '\0') return rank + ": " + vote.against;
    const std::string device = std::string(vote.device) + " of host " + vote.host;
    const auto [other, fresh] = owners.try_emplace(device + vote.boot, ranks[r]);
    if (fresh) continue;
    return rank + " shares GPU " + device + " with rank " + std::to_string(other->second) +
           ", and NCCL needs one for each rank";
  }
  return {};
}

}  // namespace

std::unique_ptr<Nccl> Nccl::make(Transport& transport, const std::vector<int>& ranks,
                                 const std::string& path, Device* device, Count count,
                                 const std::function<void(const std::string&)>& log) {
  if (path.empty()) return nullptr;  // on every rank, because it is a setting
  const auto refuse = [&](const std::string& why) {
    if (transport.rank() == 0 && log) {
      log("NCCL does not carry tensors on GPUs: " + why + ". They go through the host's memory; " +
          "QSGD_NCCL=none hides this warning");
    }
    return nullptr;
  };
  std::string why;
  const std::shared_ptr<const NcclCalls> calls = load_nccl(path, why);
  Vote vote = vote_of(calls.get(), device, why);
  why = objection(transport, ranks, vote);
  if (!why.empty()) return refuse(why);

  const Device::Use here(*device);
  struct Start {
    NcclCalls::Id id;
    int result;
  };
  const KeptOnFailure<Start> start{Start{}};
  if (transport.rank() == 0) start->result = calls->get_id(&start->id);
  qsgd::broadcast(transport, &*start, sizeof(Start), 0);
  if (start->result != kSuccess) return refuse(calls->describe(start->result, nullptr));
  std::unique_ptr<Nccl> made(new Nccl(calls, *device, transport, std::move(count)));
  vote.refuse(made->join(std::string(start->id.bytes, sizeof start->id.bytes)));
  why = objection(transport, ranks, vote);
  if (!why.empty()) return refuse(why);
  return made;
}

Nccl::Nccl(std::shared_ptr<const NcclCalls> calls, Device& device, Transport& transport,
           Count count)
    : calls_(std::move(calls)),
      device_(device),
      abort_(transport.abort_flag()),
      count_(std::move(count)),
      rank_(transport.rank()),
      size_(transport.size()) {}

Nccl::~Nccl() {
  if (communicator_ == nullptr) return;
  const Device::Use here(device_);
  calls_->abort(communicator_);
}

// Non-blocking, so that the job can be aborted meanwhile.
std::string Nccl::join(const std::string& id) {
  NcclCalls::Id its;
  std::memcpy(its.bytes, id.data(), sizeof its.bytes);
  NcclCalls::Config config;
  try {
    const int result = calls_->init(&communicator_, size_, its, rank_, &config);
    if (result != kSuccess && result != kInProgress) {
      communicator_ = nullptr;
      return calls_->describe(result, nullptr);
    }
    if (!done_within(kJoining)) return "the other ranks did not join NCCL's communicator";
  } catch (const Error& error) {
    abort_.check();
    return error.what();
  }
  return {};
}

void Nccl::close() {
  if (communicator_ == nullptr) return;
  const Device::Use here(device_);
  bool ended = false;
  try {
    const int result = calls_->finalize(communicator_);
    ended = (result == kSuccess || result == kInProgress) && done_within(kClosing);
  } catch (const Error&) {
    ended = false;
  }
  ended ? calls_->destroy(communicator_) : calls_->abort(communicator_);
  communicator_ = nullptr;
}

bool Nccl::call_done() const {
  int state = kSuccess;
  const int result = calls_->state(communicator_, &state);
  if (result == kSuccess && state == kInProgress) return false;
  if (result == kSuccess && state == kSuccess) return true;
  fail(result != kSuccess ? result : state);
}

void Nccl::fail(int result) const {
  throw internal_error("NCCL: " + calls_->describe(result, communicator_) +
                       "; NCCL_DEBUG=WARN prints more, and QSGD_NCCL=none avoids NCCL");
}

void Nccl::await_call(int result) const {
  if (result != kSuccess && result != kInProgress) fail(result);
  while (!done_within(kJoining)) {  // no timeout: only the end of the job ends it
  }
}

void Nccl::grouped(const std::function<void(const Call& call)>& calls) const {
  int first = calls_->begin_group();
  calls([&](int result) {
    if (first == kSuccess || first == kInProgress) first = result;
  });
  const int ended = calls_->end_group();
  await_call(first == kSuccess || first == kInProgress ? ended : first);
}

bool Nccl::done_within(std::chrono::seconds patience) const {
  const auto until = Clock::now() + patience;
  Backoff backoff;
  while (!call_done()) {
    abort_.check();
    if (Clock::now() > until) return false;
    backoff.pause();
  }
  return true;
}

void Nccl::finish(const std::function<void()>& deliver) {
  constexpr std::chrono::milliseconds kLook{2};  // interval for checking NCCL's asynchronous errors
  const auto mark = device_.mark(device_.stream());
  auto next = Clock::now() + kLook;
  Backoff backoff;
  while (!mark->passed()) {
    abort_.check();
    if (Clock::now() > next) {
      call_done();
      next = Clock::now() + kLook;
    }
    backoff.pause();
  }
  deliver();
  device_.synchronize();
}

void Nccl::count(size_t size_bytes, int rounds) const {
  const auto others = static_cast<size_t>(rounds * (size_ - 1));
  count_(size_bytes * others / static_cast<size_t>(size_));
}

}  // namespace qsgd::gpu
