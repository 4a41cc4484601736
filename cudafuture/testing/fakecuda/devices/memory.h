// Memory of the devices, pinned memory, and memory of the host that was registered: blocks by address.
//
// A block of a device is mapped twice. At the address that the program gets no access is allowed, as a host access of
// device memory faults with a GPU too. Operations use the second mapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace fakecuda {

struct CudaBlock {
  enum class Kind { kDevice, kPinned, kRegistered, kReserved };
  char* base = nullptr;    // at which the program knows it
  char* mirror = nullptr;  // at which operations reach it
  size_t size = 0;
  int device = 0;
  Kind kind = Kind::kDevice;
  bool is_of_device() const { return kind == Kind::kDevice || kind == Kind::kReserved; }
};

// Physical memory of the driver's virtual memory management, which a program maps into a reserved range.
struct Physical {
  int file = -1;
  size_t size = 0;
  int device = 0;
};

class CudaMemory {
 public:
  void start(int devices, size_t bytes);

  // Each returns null, or false, where there is no room.
  char* allocate(size_t size, int device);
  char* allocate_pinned(size_t size, int device);
  bool add_registered(char* base, size_t size, int device);
  void release(const CudaBlock& block);
  CudaBlock* find(const void* pointer);
  // The address at which the host reaches `size` bytes; null where they reach beyond the end of their block.
  void* reach(const void* pointer, size_t size);

  // ---- virtual memory (CUDA driver API, "Virtual Memory Management")
  char* reserve(size_t size, int device);
  bool free_reserved(char* base, size_t size);
  Physical* make_physical(size_t size, int device);
  void release_physical(Physical* physical);
  bool map(char* at, size_t size, const Physical& physical);
  bool unmap(char* at, size_t size);

  size_t total() const { return total_; }
  size_t used(int device) const { return used_.at(static_cast<size_t>(device)); }
  size_t pinned() const { return pinned_; }

 private:
  std::map<const char*, CudaBlock> blocks_;
  std::vector<size_t> used_;  // bytes, for each device
  size_t total_ = 0;          // bytes that each device has
  size_t pinned_ = 0;
};

}  // namespace fakecuda
