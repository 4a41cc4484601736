#include "fakecuda/devices/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace fakecuda {
namespace {

constexpr size_t kPage = 4096;
constexpr int kPoison = 0xFF;                     // NaN in every floating-point type
constexpr size_t kMostPoison = size_t{64} << 20;  // bytes: poison takes memory of the host

size_t round_up(size_t size) { return (size + kPage - 1) / kPage * kPage; }

char* map_pages(char* at, size_t size, int access, int file) {
  const int flags =
      (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED) | (at != nullptr ? MAP_FIXED : 0);
  void* const p = mmap(at, size, access, flags, file, 0);
  return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
}

int make_file(size_t size) {
  const int file = memfd_create("fakecuda", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0) return file;
  if (file >= 0) close(file);
  return -1;
}

void poison(char* begin, size_t size) { std::memset(begin, kPoison, std::min(size, kMostPoison)); }

}  // namespace

void CudaMemory::start(int devices, size_t bytes) {
  used_.assign(static_cast<size_t>(devices), 0);
  total_ = bytes;
}

char* CudaMemory::allocate(size_t size, int device) {
  const size_t rounded = round_up(size);
  if (used(device) + rounded > total_) return nullptr;
  const int file = make_file(rounded);
  if (file < 0) return nullptr;
  char* const base = map_pages(nullptr, rounded, PROT_NONE, file);
  char* const mirror = map_pages(nullptr, rounded, PROT_READ | PROT_WRITE, file);
  close(file);
  if (base == nullptr || mirror == nullptr) {
    if (base != nullptr) munmap(base, rounded);
    if (mirror != nullptr) munmap(mirror, rounded);
    return nullptr;
  }
  poison(mirror, rounded);
  used_[static_cast<size_t>(device)] += rounded;
  blocks_[base] = {base, mirror, rounded, device, CudaBlock::Kind::kDevice};
  return base;
}

char* CudaMemory::allocate_pinned(size_t size, int device) {
  void* base = nullptr;
  const size_t rounded = round_up(size);
  if (posix_memalign(&base, kPage, rounded) != 0) return nullptr;
  auto* const pages = static_cast<char*>(base);
  poison(pages, rounded);  // a host that reads too early sees it
  blocks_[pages] = {pages, pages, rounded, device, CudaBlock::Kind::kPinned};
  pinned_ += rounded;
  return pages;
}

bool CudaMemory::add_registered(char* base, size_t size, int device) {
  if (find(base) != nullptr) return false;
  blocks_[base] = {base, base, size, device, CudaBlock::Kind::kRegistered};
  pinned_ += size;
  return true;
}

void CudaMemory::release(const CudaBlock& block) {
  switch (block.kind) {
    case CudaBlock::Kind::kDevice:
      used_[static_cast<size_t>(block.device)] -= block.size;
      munmap(block.mirror, block.size);
      munmap(block.base, block.size);
      break;
    case CudaBlock::Kind::kPinned:
      pinned_ -= block.size;
      free(block.base);
      break;
    case CudaBlock::Kind::kRegistered:
      pinned_ -= block.size;
      break;
    case CudaBlock::Kind::kReserved:
      munmap(block.mirror, block.size);
      munmap(block.base, block.size);
      break;
  }
  blocks_.erase(block.base);
}

CudaBlock* CudaMemory::find(const void* pointer) {
  const auto* const address = static_cast<const char*>(pointer);
  const auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return nullptr;
  CudaBlock& block = std::prev(after)->second;
  return address < block.base + block.size ? &block : nullptr;
}

void* CudaMemory::reach(const void* pointer, size_t size) {
  auto* const address = const_cast<char*>(static_cast<const char*>(pointer));
  const CudaBlock* const block = find(pointer);
  if (block == nullptr) return address;
  if (address + size > block->base + block->size) return nullptr;
  return block->mirror + (address - block->base);
}

// A tensor may reach over several mappings of a reservation, so their mirrors lie together too.
char* CudaMemory::reserve(size_t size, int device) {
  char* const base = map_pages(nullptr, size, PROT_NONE, -1);
  char* const mirror = map_pages(nullptr, size, PROT_NONE, -1);
  if (base == nullptr || mirror == nullptr) return nullptr;
  blocks_[base] = {base, mirror, size, device, CudaBlock::Kind::kReserved};
  return base;
}

bool CudaMemory::free_reserved(char* base, size_t size) {
  const auto found = blocks_.find(base);
  if (found == blocks_.end() || found->second.kind != CudaBlock::Kind::kReserved || found->second.size != size)
    return false;
  const CudaBlock block = found->second;
  release(block);
  return true;
}

Physical* CudaMemory::make_physical(size_t size, int device) {
  if (used(device) + size > total_) return nullptr;
  const int file = make_file(size);
  if (file < 0) return nullptr;
  used_[static_cast<size_t>(device)] += size;
  return new Physical{file, size, device};
}

void CudaMemory::release_physical(Physical* physical) {
  used_[static_cast<size_t>(physical->device)] -= physical->size;
  close(physical->file);
  delete physical;
}

bool CudaMemory::map(char* at, size_t size, const Physical& physical) {
  CudaBlock* const block = find(at);
  if (block == nullptr || block->kind != CudaBlock::Kind::kReserved) return false;
  block->device = physical.device;
  char* const mirror = map_pages(block->mirror + (at - block->base), size, PROT_READ | PROT_WRITE, physical.file);
  if (mirror == nullptr) return false;
  poison(mirror, size);
  return true;
}

bool CudaMemory::unmap(char* at, size_t size) {
  CudaBlock* const block = find(at);
  if (block == nullptr || block->kind != CudaBlock::Kind::kReserved) return false;
  return map_pages(block->mirror + (at - block->base), size, PROT_NONE, -1) != nullptr;
}

}  // namespace fakecuda
