#include "storage/mapping.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cerrno>
#include <exception>
#include <memory>

#include "storage/checksum.h"
#include "storage/failure.h"
#include "storage/page.h"

namespace cudafuture::storage {
namespace {

class Mapping {
 public:
  Mapping(const Place& place, const File& file) : into_page_(place.offset() % kPage), size_(into_page_ + place.size()) {
    memory_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.through_cache(),
                     static_cast<off_t>(place.offset() - into_page_));
    if (memory_ == MAP_FAILED) throw_errno("cannot map", file.path(), errno);
  }
  ~Mapping() { ::munmap(memory_, size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void* data() const noexcept { return static_cast<std::byte*>(memory_) + into_page_; }

 private:
  std::size_t into_page_;
  std::size_t size_;  // bytes
  void* memory_;
};

}  // namespace

at::Tensor map_tensor(const EntryPtr& entry, const std::string& key, bool verify) {
  const at::TensorOptions options = at::TensorOptions().dtype(entry->shape.dtype).device(c10::kCPU);
  if (entry->size() == 0) return at::empty(entry->shape.sizes, options);
  const Place& place = entry->place();
  const std::shared_ptr<File> opened = Slabs::file_of(place.slab());
  if (opened == nullptr && place.slab().failure != nullptr) std::rethrow_exception(place.slab().failure);
  if (opened == nullptr) throw Failure("the store is closed", EBADF, "");
  File& file = *opened;
  const File::Use use(file);  // the descriptor stays open meanwhile
  if (!use) throw Failure("the store is closed", EBADF, file.path());
  if (place.offset() + place.size() > file.size()) {
    throw Failure("key '" + key + "': its bytes are not there: " + file.path() + " ends before", 0, file.path(),
                  place.offset(), place.size());
  }
  const auto mapping = std::make_shared<Mapping>(place, file);
  if (verify && entry->has_digest) {
    Checksum checksum;
    checksum.add(0, place.size());
    const iovec whole = {mapping->data(), place.size()};
    checksum.take(0, &whole, 1);
    if (checksum.digest(0, entry->seed) != entry->digest) {
      throw not_as_written(key, file.path(), place.offset(), place.size());
    }
  }
  return at::from_blob(mapping->data(), entry->shape.sizes, [mapping, entry](void*) {}, options);
}

}  // namespace cudafuture::storage
