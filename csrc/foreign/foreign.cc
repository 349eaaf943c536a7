#include "foreign/foreign.h"

#include <atomic>
#include <mutex>

namespace qsgd {
namespace {

// A framework's library calls without a context of its own, and a process has one job at a time.
struct Current {
  std::mutex mutex;
  std::weak_ptr<Engine> engine;
};

Current& current() {
  static Current slot;
  return slot;
}

// Operations of one call, some of which are under way.
struct Call {
  std::function<void(const Error*, const Handles&)> done;
  Handles handles;
  std::atomic<size_t> left;
};

// The message of the first that failed, in the order of the tensors.
void end(Call& call) {
  try {
    for (const auto& handle : call.handles) handle->check();
  } catch (const Error& error) {
    return call.done(&error, {});
  }
  call.done(nullptr, call.handles);
}

void name(std::vector<ForeignTensor>& tensors, Engine& engine) {
  const Submission& first = tensors.front().submission;
  if (!first.name.empty()) return;
  const std::string base = engine.next_name(first.kind, first.set);
  const bool grouped = first.group_size != 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    Submission& s = tensors[i].submission;
    s.name = grouped || tensors.size() > 1 ? base + "." + std::to_string(i) : base;
    s.group = grouped ? base : "";
  }
}

void submit(std::vector<ForeignTensor> tensors, const std::shared_ptr<void>& keep, Call& call) {
  const std::shared_ptr<Engine> engine = current_engine();
  name(tensors, *engine);
  for (ForeignTensor& t : tensors) {
    t.submission.foreign = true;
    call.handles.push_back(engine->submit(std::move(t.submission), t.in, t.out, keep));
  }
}

}  // namespace

void set_current_engine(std::weak_ptr<Engine> engine) {
  const std::lock_guard<std::mutex> lock(current().mutex);
  current().engine = std::move(engine);
}

std::shared_ptr<Engine> current_engine() {
  std::shared_ptr<Engine> engine;
  {
    const std::lock_guard<std::mutex> lock(current().mutex);
    engine = current().engine.lock();
  }
  if (engine == nullptr) {
    throw usage_error("qsgd_hpc is not initialised on this rank; call hvd.init() first");
  }
  return engine;
}

std::string write_facts(const Submission& submission) {
  static constexpr char kDigits[] = "0123456789abcdef";
  Writer to;
  submission.write(to);
  std::string text;
  for (const char byte : to.bytes()) {
    text += kDigits[static_cast<uint8_t>(byte) >> 4];
    text += kDigits[static_cast<uint8_t>(byte) & 15];
  }
  return text;
}

Submission read_facts(const char* facts, size_t size_bytes) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::vector<char> bytes;
  for (size_t i = 0; i + 1 < size_bytes; i += 2) {
    bytes.push_back(static_cast<char>(digit(facts[i]) << 4 | digit(facts[i + 1])));
  }
  Reader from(bytes.data(), bytes.size());
  return Submission::read(from);
}

void start_foreign(std::vector<ForeignTensor> tensors, const std::shared_ptr<void>& keep,
                   std::function<void(const Error*, const Handles&)> done) {
  auto call = std::make_shared<Call>();
  call->done = std::move(done);
  try {
    submit(std::move(tensors), keep, *call);
  } catch (const Error& error) {
    // Those that were submitted before go on by themselves, and keep their memory.
    return call->done(&error, {});
  }
  call->left = call->handles.size();
  for (size_t i = 0; i < call->handles.size(); ++i) {
    call->handles[i]->when_done([call, i] {
      call->handles[i]->let_go();
      if (--call->left == 0) end(*call);
    });
  }
}

}  // namespace qsgd
