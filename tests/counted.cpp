// PyTorch's allocator of CPU tensors, with a count of what is alive and of the most that ever was.
//
// A profiler sees memory come and go on threads that it watches. Collectives free tensors on threads
// of their own, so only the allocator itself can count.

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace {

struct Block {
  c10::DataPtr memory;
  long long size;
};

c10::Allocator* inner = nullptr;
std::mutex guard;  // of all below
std::unordered_map<void*, Block> blocks;
long long alive = 0;
long long most = 0;

void release(void* address) {
  c10::DataPtr freed;  // goes after the lock: its address may be given out again from then on
  std::lock_guard<std::mutex> lock(guard);
  auto found = blocks.find(address);
  if (found == blocks.end()) {  // from before the count
    inner->raw_deleter()(address);
    return;
  }
  alive -= found->second.size;
  freed = std::move(found->second.memory);
  blocks.erase(found);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto memory = inner->allocate(size);
    void* address = memory.get();
    if (address == nullptr) {
      return memory;
    }
    std::lock_guard<std::mutex> lock(guard);
    blocks.insert_or_assign(address, Block{std::move(memory), static_cast<long long>(size)});
    alive += static_cast<long long>(size);
    most = std::max(most, alive);
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    inner->copy_data(to, from, size);
  }
};

}  // namespace

extern "C" {

void start_count() {
  static Counting counting;
  inner = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counting, 1);
}

long long alive_bytes() {
  std::lock_guard<std::mutex> lock(guard);
  return alive;
}

// Returns the most that was alive since the last call, and begins again.
long long take_most_bytes() {
  std::lock_guard<std::mutex> lock(guard);
  long long found = most;
  most = alive;
  return found;
}

}  // extern "C"
