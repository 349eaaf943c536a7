#include "engine/trace_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "common/error.h"
#include "common/thread_name.h"

namespace qsgd {
namespace {

constexpr std::chrono::milliseconds kInterval{200};

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) {
      json += c;
      continue;
    }
    std::array<char, 8> code;
    std::snprintf(code.data(), code.size(), "\\u%04x", c);
    json += code.data();
  }
  return json + '"';
}

std::string number(const char* format, double value) {
  std::array<char, 40> text;
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

int open_file(const std::string& path, int rank) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file >= 0) return file;
  throw usage_error("rank " + std::to_string(rank) + ": timeline " + path + ": " +
                    std::strerror(errno) + "; choose a path in a folder that exists and that " +
                    "this rank's host can write to");
}

// A timeline that cannot be written (disk full) must not end the training.
void write_all(int file, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t wrote = ::write(file, text.data() + done, text.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return;
    done += static_cast<size_t>(wrote);
  }
}

}  // namespace

void TraceArgs::add_key(const char* key) {
  json_ += json_.empty() ? "\"" : ",\"";
  json_ += key;
  json_ += "\":";
}

TraceArgs& TraceArgs::add(const char* key, const std::string& text) {
  add_key(key);
  json_ += quoted(text);
  return *this;
}

TraceArgs& TraceArgs::add(const char* key, uint64_t number) {
  add_key(key);
  json_ += std::to_string(number);
  return *this;
}

TraceArgs& TraceArgs::add(const char* key, double value) {
  add_key(key);
  json_ += std::isfinite(value) ? number("%.6g", value) : "null";
  return *this;
}

TraceWriter::TraceWriter(const std::string& path, int rank, Clock::time_point zero)
    : process_(rank), zero_(zero), file_(open_file(path, rank)), thread_([this] { run(); }) {
  TraceArgs name, order;
  name.add("name", "rank " + std::to_string(rank));
  order.add("sort_index", static_cast<uint64_t>(rank));
  add({'M', "process_name", 0, zero, {}, std::move(name)});
  add({'M', "process_sort_index", 0, zero, {}, std::move(order)});
}

TraceWriter::~TraceWriter() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
  close(file_);
}

// Wakes no thread: the writer polls.
void TraceWriter::add(Event event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(std::move(event));
}

void TraceWriter::run() {
  name_thread("qsgd-timeline");
  bool last = false;
  while (!last) {
    std::vector<Event> events;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, kInterval, [this] { return closing_; });
      events.swap(events_);
      last = closing_;
    }
    write(events);
  }
  write_all(file_, "\n]\n");
}

// In one call, so that a killed process leaves complete lines.
void TraceWriter::write(const std::vector<Event>& events) {
  std::string text;
  for (const Event& event : events) {
    text += first_ ? "[\n" : ",\n";
    text += format(event);
    first_ = false;
  }
  write_all(file_, text);
}

std::string TraceWriter::format(const Event& event) const {
  using Microseconds = std::chrono::duration<double, std::micro>;
  std::string line = "{\"ph\":\"";
  line += event.phase;
  line += "\",\"name\":\"" + event.name + "\",\"pid\":" + std::to_string(process_) +
          ",\"tid\":" + std::to_string(event.row);
  if (event.phase != 'M') {
    line += ",\"ts\":" + number("%.3f", Microseconds(event.at - zero_).count());
  }
  if (event.phase == 'X') line += ",\"dur\":" + number("%.3f", Microseconds(event.lasts).count());
  if (event.phase == 'i') line += ",\"s\":\"t\"";
  if (!event.args.json().empty()) line += ",\"args\":{" + event.args.json() + "}";
  return line + "}";
}

}  // namespace qsgd
