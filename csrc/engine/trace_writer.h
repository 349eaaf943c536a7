// Writer of a file in the Trace Event Format (JSON array), with a separate thread. Every event is a
// line, and the end of the array may be missing, so the file of a killed process is readable.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace qsgd {

// Arguments of an event, in the order of the file.
class TraceArgs {
 public:
  TraceArgs& add(const char* key, const std::string& text);
  TraceArgs& add(const char* key, uint64_t number);
  TraceArgs& add(const char* key, double number);  // null if not finite, as in JSON
  const std::string& json() const { return json_; }

 private:
  void add_key(const char* key);
  std::string json_;
};

class TraceWriter {
 public:
  using Clock = std::chrono::steady_clock;

  struct Event {
    char phase;  // B begin, E end, X complete, i instant, M metadata
    std::string name;
    uint32_t row;
    Clock::time_point at;
    Clock::duration lasts{};
    TraceArgs args = {};
  };

  // Times in the file are relative to `zero`. `rank` is the process of all events. Throws a usage
  // error if the file cannot be created.
  TraceWriter(const std::string& path, int rank, Clock::time_point zero);
  ~TraceWriter();  // ends the array
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  void add(Event event);

 private:
  void run();
  void write(const std::vector<Event>& events);
  std::string format(const Event& event) const;

  const int process_;
  const Clock::time_point zero_;
  const int file_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Event> events_;
  bool closing_ = false;
  bool first_ = true;  // used by the thread alone
  std::thread thread_;
};

}  // namespace qsgd
