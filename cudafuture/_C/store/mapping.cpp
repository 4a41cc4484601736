#include "store/mapping.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cerrno>
#include <exception>
#include <memory>
#include <stdexcept>

#include "io/checksum.h"
#include "io/failure.h"
#include "io/page.h"

namespace cudafuture::store {

using namespace io;

namespace {

// A mapping of several extents into adjacent pages of memory.
class Mapping {
 public:
  Mapping(std::size_t into_page, std::size_t size) : into_page_(into_page), size_(into_page + size) {
    memory_ = ::mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw_errno("cannot reserve addresses for", "a mapping", errno);
  }
  ~Mapping() { ::munmap(memory_, size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // `at`: bytes from the beginning of the data, with the same offset in a page as the extent.
  void add(std::size_t at, const Extent& extent, const File& file) {
    const std::size_t into_page = extent.offset() % kPage;
    void* const wanted = static_cast<std::byte*>(data()) + at - into_page;
    const void* const got = ::mmap(wanted, into_page + extent.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
                                   file.through_cache(), static_cast<off_t>(extent.offset() - into_page));
    if (got == MAP_FAILED) throw_errno("cannot map", file.path(), errno);
  }

  void* data() const noexcept { return static_cast<std::byte*>(memory_) + into_page_; }

 private:
  std::size_t into_page_;
  std::size_t size_;  // bytes
  void* memory_;
};

void map_entry(Mapping& mapping, std::size_t at, const EntryPtr& entry, const std::string& key, bool verify) {
  const Extent& extent = entry->extent;
  const std::shared_ptr<File> opened = Slabs::file_of(extent.slab());
  if (opened == nullptr && extent.slab().failure != nullptr) std::rethrow_exception(extent.slab().failure);
  if (opened == nullptr) throw Failure("the store is closed", EBADF, "");
  File& file = *opened;
  const File::Use use(file);  // keeps the descriptor open
  if (!use) throw Failure("the store is closed", EBADF, file.path());
  if (extent.offset() + extent.size() > file.size()) {
    throw Failure("key '" + key + "': its bytes are not there: " + file.path() + " ends before", 0, file.path(),
                  extent.offset(), extent.size());
  }
  mapping.add(at, extent, file);
  if (!verify || !entry->has_digest) return;
  Checksum checksum;
  checksum.add(0, extent.size());
  const iovec whole = {static_cast<std::byte*>(mapping.data()) + at, extent.size()};
  checksum.take(0, &whole, 1);
  if (checksum.digest(0, entry->seed) != entry->digest) {
    throw not_as_written(key, file.path(), extent.offset(), extent.size());
  }
}

// Throws std::invalid_argument unless the tensors can be mapped to adjacent pages.
void expect_neighbours(const std::vector<EntryPtr>& entries, const std::vector<std::string>& keys) {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const Entry& entry = *entries[i];
    const std::string name = "key '" + keys[i] + "'";
    if (entry.shape.dtype != entries[0]->shape.dtype) throw std::invalid_argument(name + " has another dtype");
    if (entry.size() == 0 || entry.extent.offset() % kPage != 0 ||
        (i + 1 < entries.size() && entry.size() % kPage != 0)) {
      throw std::invalid_argument(name + " of " + std::to_string(entry.size()) +
                                  " bytes is not a whole number of pages (4 KiB), which all but the last have to be");
    }
  }
}

}  // namespace

at::Tensor map_tensors(const std::vector<EntryPtr>& entries, const std::vector<std::string>& keys, bool verify) {
  const Entry& first = *entries[0];
  const at::TensorOptions options = at::TensorOptions().dtype(first.shape.dtype).device(c10::kCPU);
  if (entries.size() == 1 && first.size() == 0) return at::empty(first.shape.sizes, options);
  if (entries.size() > 1) expect_neighbours(entries, keys);
  std::size_t size = 0;
  for (const EntryPtr& entry : entries) size += entry->size();
  const auto mapping = std::make_shared<Mapping>(first.extent.offset() % kPage, size);
  std::size_t end = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    map_entry(*mapping, end, entries[i], keys[i], verify);
    end += entries[i]->size();
  }
  const std::vector<std::int64_t> flat = {static_cast<std::int64_t>(size / c10::elementSize(first.shape.dtype))};
  return at::from_blob(
      mapping->data(), entries.size() == 1 ? at::IntArrayRef(first.shape.sizes) : at::IntArrayRef(flat),
      [mapping, entries](void*) {}, options);
}

}  // namespace cudafuture::store
