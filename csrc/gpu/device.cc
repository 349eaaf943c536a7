#include "gpu/device.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"
#include "gpu/library.h"

namespace qsgd::gpu {
namespace {

constexpr size_t kLeast = size_t{1} << 16;  // of a block, in bytes

thread_local bool owns_thread = false;

}  // namespace

Mark::Mark(Device& device, Stream stream)
    : device_(device), stream_(stream), event_(device.take_event()) {
  const Device::Use here(device);
  device.require(device.library().record(event_, stream));
}

Mark::~Mark() {
  const std::lock_guard<std::mutex> lock(device_.mutex_);
  device_.events_.push_back(event_);
}

bool Mark::passed() {
  if (passed_) return true;
  const Device::Use here(device_);  // else the query may initialize the first device, where other
  device_.require(device_.library().passed(event_, &passed_));  // processes have their tensors
  return passed_;
}

DeviceMemory::DeviceMemory(Device& device, size_t size_bytes)
    : device_(&device), size_bytes_(size_bytes) {
  const Device::Use here(device);
  void* data = device.memory_.take(std::max(size_bytes, kLeast), whole_, [&](void* smaller) {
    device.require(device.library().give(smaller, device.stream()));
  });
  if (data == nullptr && device.library().take(whole_, &data, device.stream()) != nullptr) {
    // Free blocks of other sizes may hold what is missing.
    device.memory_.clear([&](void* block) { device.library().give(block, device.stream()); });
    device.require(device.library().take(whole_, &data, device.stream()));
  }
  data_ = static_cast<uint8_t*>(data);
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) device_->memory_.give(data_, whole_);
}

void DeviceMemory::swap(DeviceMemory& o) noexcept {
  std::swap(device_, o.device_);
  std::swap(data_, o.data_);
  std::swap(size_bytes_, o.size_bytes_);
  std::swap(whole_, o.whole_);
}

void* Blocks::find(size_t size, size_t& whole, void*& smaller) {
  whole = size;
  const std::lock_guard<std::mutex> lock(mutex_);
  auto found = free_.lower_bound(size);
  if (found != free_.end() && found->first < 2 * size) {
    void* const block = found->second;
    whole = found->first;
    free_.erase(found);
    return block;
  }
  if (found != free_.begin() && 2 * (--found)->first > size) {
    smaller = found->second;
    free_.erase(found);
  }
  return nullptr;
}

void Blocks::give(void* block, size_t whole) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.emplace(whole, block);
}

Device::Use::Use(const Device& device) : device_(device) {
  device_.require(device_.library_.use(device_.number_, &before_));
}

Device::Use::~Use() {
  int ours;
  if (!owns_thread && before_ != device_.number_) device_.library_.use(before_, &ours);
}

void Device::own_this_thread() { owns_thread = true; }

struct Device::Pinned {
  explicit Pinned(const Library& its) : library(its) {}
  ~Pinned() {
    blocks.clear([this](void* block) { library.give_pinned(block); });
  }
  const Library& library;
  Blocks blocks;
  std::atomic<size_t> bytes_out{0};
};

Device::Device(const Library& library, int number, std::shared_ptr<AbortFlag> abort)
    : library_(library),
      number_(number),
      abort_(std::move(abort)),
      pinned_(std::make_shared<Pinned>(library)) {
  const Use here(*this);
  require(library_.make_stream(&stream_));
}

Device::~Device() {
  int before = -1;
  if (library_.use(number_, &before) != nullptr) return;  // the runtime has been shut down
  kept_.clear();
  memory_.clear([this](void* block) { library_.give(block, stream_); });
  library_.end_stream(stream_);
  for (Event event : events_) library_.end_event(event);
  if (before >= 0 && before != number_) library_.use(before, &before);
}

void Device::require(const char* failure) const {
  if (failure == nullptr) return;
  throw internal_error("GPU " + std::to_string(number_) + ": " + failure);
}

Event Device::take_event() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!events_.empty()) {
      const Event event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  const Use here(*this);
  Event event = nullptr;
  require(library_.make_event(&event));
  return event;
}

void Device::copy(void* to, const void* from, size_t size_bytes) {
  if (size_bytes > 0) require(library_.copy(to, from, size_bytes, stream_));
}

const uint8_t* Device::upload(const void* data, size_t size_bytes) {
  PinnedMemory here = take_pinned(size_bytes);
  std::memcpy(here.get(), data, size_bytes);
  DeviceMemory there(*this, size_bytes);
  copy(there.data(), here.get(), size_bytes);
  const uint8_t* const address = there.data();
  keep(std::move(here));
  keep(std::move(there));
  return address;
}

void Device::clear(void* to, size_t size_bytes) {
  if (size_bytes > 0) require(library_.clear(to, size_bytes, stream_));
}

void Device::synchronize() {
  await(*mark(stream_));
  kept_.clear();
}

void Device::await(Mark& mark) {
  Backoff backoff;
  while (!mark.passed()) {
    abort_->check();
    backoff.pause();
  }
}

Device::PinnedMemory Device::take_pinned(size_t size_bytes) {
  const Use here(*this);
  size_t whole = 0;
  void* block = pinned_->blocks.take(std::max(size_bytes, kLeast), whole, [this](void* smaller) {
    require(library_.give_pinned(smaller));
  });
  if (block == nullptr) {
    const char* const failure = library_.take_pinned(whole, &block);
    if (failure != nullptr) {
      throw internal_error("GPU " + std::to_string(number_) + ": no " + std::to_string(whole) +
                           " bytes of pinned memory (" + failure + "); look at `ulimit -l` and " +
                           "at the memory limit of the job");
    }
  }
  pinned_->bytes_out += whole;
  return {static_cast<uint8_t*>(block), [pool = pinned_, whole](uint8_t* memory) {
            pool->bytes_out -= whole;
            pool->blocks.give(memory, whole);
          }};
}

size_t Device::pinned_bytes() const { return pinned_->bytes_out; }

Device& Devices::at(int number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Device>& device = devices_[number];
  if (device == nullptr) {
    if (path_.empty()) {
      throw usage_error(
          "a tensor in device memory was submitted, but this core has no GPU kernels");
    }
    device = std::make_shared<Device>(load_library(path_), number, abort_);
  }
  return *device;
}

}  // namespace qsgd::gpu
