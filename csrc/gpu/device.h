// A device with tensors of this process: the engine's stream on it, marks of work queued by
// callers, and memory.
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

// The work queued on a caller's stream up to a point in time. Used by any thread.
class Mark {
 public:
  Mark(Device& device, Stream stream);
  ~Mark();
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

  // Whether all of that work is done; does not block.
  bool passed();
  Device& device() const { return device_; }
  Stream stream() const { return stream_; }

 private:
  Device& device_;
  const Stream stream_;
  const Event event_;
  bool passed_ = false;
};

// Memory of a device. It is reused in the order of the device's stream.
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
  size_t whole_ = 0;  // size of the block
};

// Free blocks by size, kept because allocating and freeing may block for the device. Used by any
// thread.
class Blocks {
 public:
  // Returns a block of at least `size` and less than twice that; null if there is none. Then
  // end(block) is called for a smaller one of more than half, which the caller's new one replaces:
  // otherwise, blocks of ever larger sizes would accumulate.
  template <class End>
  void* take(size_t size, size_t& whole, const End& end) {
    void* smaller = nullptr;
    void* const block = find(size, whole, smaller);
    if (smaller != nullptr) end(smaller);
    return block;
  }
  void give(void* block, size_t whole);
  // Calls end(block) for each.
  template <class End>
  void clear(const End& end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [size, block] : free_) end(block);
    free_.clear();
  }

 private:
  void* find(size_t size, size_t& whole, void*& smaller);

  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
};

// Functions that queue work or block must be called by one thread at a time: the one that drives
// the engine.
class Device : public Place, public std::enable_shared_from_this<Device> {
 public:
  using PinnedMemory = std::shared_ptr<uint8_t>;

  // `abort` ends waits.
  Device(const Library& library, int number, std::shared_ptr<AbortFlag> abort);
  ~Device() override;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Marks the work queued so far on one of the device's streams. Used by any thread.
  std::shared_ptr<Mark> mark(Stream stream) { return std::make_shared<Mark>(*this, stream); }

  const Library& library() const { return library_; }
  Stream stream() const { return stream_; }
  // Makes the device current for this thread during the object's lifetime; permanently in a thread
  // of the engine, because restoring would make it use the first device, where other processes have
  // their tensors.
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

  // Copies between any two places, in stream order.
  void copy(void* to, const void* from, size_t size_bytes);
  void clear(void* to, size_t size_bytes);
  // Returns a copy of the list on the device, valid until the next synchronize().
  template <class T>
  const T* upload(const std::vector<T>& list) {
    return reinterpret_cast<const T*>(upload(list.data(), list.size() * sizeof(T)));
  }
  // Keeps `value`, which queued work reads, until the next synchronize().
  template <class T>
  void keep(T value) {
    kept_.push_back(std::make_shared<T>(std::move(value)));
  }
  // Blocks by polling until all queued work, or the marked work, is done. Throws if the job is
  // aborted meanwhile. Any thread may await a mark.
  void synchronize();
  void await(Mark& mark);

  // Allocates pinned host memory, which copies use at full speed; returned to the pool on
  // destruction. Used by any thread.
  PinnedMemory take_pinned(size_t size_bytes);
  // Bytes of it that are in use.
  size_t pinned_bytes() const;

  // Writes its identifier; see Library.
  void identify(char* identity) const { require(library_.identify(number_, identity)); }
  // Whether the kernels support the code.
  bool codes(const CodecSpec& spec) const { return library_.refuse(spec) == nullptr; }
  std::unique_ptr<SegmentCoder> make_coder(std::vector<ReduceTensor>& tensors,
                                           const ReduceArgs& args, uint64_t seed, int rank,
                                           int size) override;
  std::shared_ptr<uint8_t> take_message(size_t size_bytes) override {
    return take_pinned(size_bytes);
  }

  // Throws an internal error with the text unless it is null.
  void require(const char* failure) const;

 private:
  friend class Mark;
  friend class DeviceMemory;
  struct Pinned;  // exists as long as any of its memory
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

// The devices that this process uses, by number. Used by any thread.
class Devices {
 public:
  // `library` is the file of the kernels; empty: none.
  Devices(std::string library, std::shared_ptr<AbortFlag> abort)
      : path_(std::move(library)), abort_(std::move(abort)) {}
  // Throws a usage error if there are no kernels.
  Device& at(int number);

 private:
  const std::string path_;
  const std::shared_ptr<AbortFlag> abort_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<Device>> devices_;  // shared with results in their memory
};

}  // namespace qsgd::gpu
