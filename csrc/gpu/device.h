// A device that holds tensors of this process: the stream on which the engine works there, marks of
// what callers have queued, and memory that goes with it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/segment_coder.h"
#include "gpu/codec.h"

namespace qsgd::gpu {

class Device;

// What a caller's stream had been given by some time. Any thread's.
class Mark {
 public:
  Mark(Device& device, Stream stream);
  ~Mark();
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

  // Whether all of it is done, without waiting.
  bool passed();
  Device& device() const { return device_; }
  Stream stream() const { return stream_; }

 private:
  Device& device_;
  const Stream stream_;
  const Event event_;
  bool passed_ = false;
};

// Memory of a device. Who takes it next comes behind in the device's stream.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Device& device, size_t size_bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& o) noexcept { swap(o); }
  DeviceMemory& operator=(DeviceMemory&& o) noexcept {
    swap(o);
    return *this;
  }

  uint8_t* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }
  Device* device() const { return device_; }

 private:
  void swap(DeviceMemory& o) noexcept;
  Device* device_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t size_bytes_ = 0;
  size_t whole_ = 0;  // of the block
};

// Blocks that are free, by size: taking and giving them back may wait for the device. Any thread's.
class Blocks {
 public:
  // One of at least this size, and of less than twice; null where there is none.
  void* take(size_t size, size_t& whole);
  void give(void* block, size_t whole);
  // Calls end(block) for each.
  template <class End>
  void clear(const End& end) {
    for (auto& [size, block] : free_) end(block);
    free_.clear();
  }

 private:
  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
};

// Calls that queue or wait are for one thread at a time: the one that drives the engine.
class Device : public Place {
 public:
  using PinnedMemory = std::shared_ptr<uint8_t>;

  // `abort` ends waits.
  Device(const Library& library, int number, std::shared_ptr<AbortFlag> abort);
  ~Device() override;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Marks what the stream, one of the device's, has been given by now. Any thread's.
  std::shared_ptr<Mark> mark(Stream stream) { return std::make_shared<Mark>(*this, stream); }

  const Library& library() const { return library_; }
  Stream stream() const { return stream_; }
  // Makes the device this thread's while the value lives; for good in a thread of the engine's own,
  // which would otherwise begin to use the first device, where others have their tensors.
  class Use {
   public:
    explicit Use(const Device& device);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const Device& device_;
    int before_ = -1;
  };
  static void own_this_thread();

  // Of any two places; in the order of the stream.
  void copy(void* to, const void* from, size_t size_bytes);
  void clear(void* to, size_t size_bytes);
  // A copy of the list there, until the next settle().
  template <class T>
  const T* upload(const std::vector<T>& list) {
    return reinterpret_cast<const T*>(upload(list.data(), list.size() * sizeof(T)));
  }
  // Keeps what work that is queued reads until the next settle().
  template <class T>
  void keep(T value) {
    kept_.push_back(std::make_shared<T>(std::move(value)));
  }
  // Returns when all that is queued is done, or what was marked, without a call that waits for the
  // device. Throws when the job is aborted meanwhile.
  void settle();
  void await(Mark& mark);

  // From the host's memory that copies take at full speed; comes back when let go. Any thread's.
  PinnedMemory take_pinned(size_t size_bytes);
  // Of it, what is not back.
  size_t pinned_bytes() const;

  // Writes what names it among the devices of its host; see Library.
  void identify(char* identity) const { require(library_.identify(number_, identity)); }
  // Whether the kernels code so.
  bool codes(const CodecSpec& spec) const { return library_.refuse(spec) == nullptr; }
  std::unique_ptr<SegmentCoder> make_coder(std::vector<ReduceTensor>& tensors,
                                           const ReduceArgs& args, uint64_t seed, int rank,
                                           int size) override;
  std::shared_ptr<uint8_t> take_message(size_t size_bytes) override {
    return take_pinned(size_bytes);
  }

  // Throws an error with what a call says, unless it is null.
  void require(const char* failure) const;

 private:
  friend class Mark;
  friend class DeviceMemory;
  struct Pinned;  // lives as long as any of its memory
  Event take_event();
  const uint8_t* upload(const void* data, size_t size_bytes);

  const Library& library_;
  const int number_;
  const std::shared_ptr<AbortFlag> abort_;
  const std::shared_ptr<Pinned> pinned_;
  Blocks memory_;
  Stream stream_ = nullptr;
  std::vector<std::shared_ptr<void>> kept_;
  std::mutex mutex_;  // guards events_
  std::vector<Event> events_;
};

// Those that this process has used, by number. Any thread's.
class Devices {
 public:
  // `library` is the file of the kernels; empty: there are none.
  Devices(std::string library, std::shared_ptr<AbortFlag> abort)
      : path_(std::move(library)), abort_(std::move(abort)) {}
  // Throws a usage error where there are no kernels.
  Device& at(int number);

 private:
  const std::string path_;
  const std::shared_ptr<AbortFlag> abort_;
  std::mutex mutex_;
  std::map<int, std::unique_ptr<Device>> devices_;
};

}  // namespace qsgd::gpu
