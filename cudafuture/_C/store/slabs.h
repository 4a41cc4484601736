// The slab files of a store, and the allocation of their bytes.
//
// A slab is a preallocated file. An extent is a range of its bytes, with the tensor of one key. It owns the pages that
// it touches, which are freed when it is dropped. Extents that were allocated together may share a page.
//
// Empty slabs are kept for later writes, because overwriting allocated blocks is fastest. trim() removes them; so does
// take() when the disk is full.
//
// Locks: mutex_ guards all fields, and no system call is made under it once the store is open. growth_ is held while a
// slab is created, which may take seconds; mutex_ is taken under it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/file.h"
#include "io/free_space.h"

namespace cudafuture::store {

class Slabs;

struct Slab {
  Slab(std::weak_ptr<Slabs> owner, std::uint64_t number, std::uint64_t size)
      : owner(std::move(owner)), number(number), free_space(size) {}

  std::weak_ptr<Slabs> owner;
  std::uint64_t number;
  std::shared_ptr<io::File> file;  // null: it could not be opened
  std::exception_ptr failure;      // the reason why it could not be opened, or takes no more extents
  io::FreeSpace free_space;
  std::unordered_map<std::uint64_t, std::uint32_t> shared;  // pages that several extents touch, with their number
};

class Extent {
 public:
  Extent() = default;  // none
  Extent(std::shared_ptr<Slab> slab, std::uint64_t offset, std::uint64_t size, bool has_pages = true) noexcept
      : slab_(std::move(slab)), offset_(offset), size_(size), has_pages_(has_pages) {}
  Extent(Extent&& other) noexcept { *this = std::move(other); }
  Extent& operator=(Extent&& other) noexcept {
    std::swap(slab_, other.slab_);
    std::swap(offset_, other.offset_);
    std::swap(size_, other.size_);
    std::swap(has_pages_, other.has_pages_);
    return *this;
  }
  ~Extent();
  Extent(const Extent&) = delete;
  Extent& operator=(const Extent&) = delete;

  explicit operator bool() const noexcept { return slab_ != nullptr; }
  const Slab& slab() const noexcept { return *slab_; }
  std::uint64_t offset() const noexcept { return offset_; }
  std::uint64_t size() const noexcept { return size_; }  // bytes

 private:
  friend class Slabs;

  std::shared_ptr<Slab> slab_;
  std::uint64_t offset_ = 0;
  std::uint64_t size_ = 0;
  bool has_pages_ = true;  // false: its file ends before it does, or the store is read-only
};

class Slabs : public std::enable_shared_from_this<Slabs> {
 public:
  struct Options {
    std::string folder;
    io::Direct direct = io::Direct::automatic;
    bool durable = false;  // a slab's name is durable before the slab is written to
    bool read_only = false;
    std::uint64_t capacity = 0;  // maximum bytes of all extents; 0: unlimited
  };
  struct Statistics {
    std::uint64_t slabs = 0;
    std::uint64_t bytes = 0;  // of their files
    std::uint64_t used = 0;   // of extents
  };

  explicit Slabs(Options options) : options_(std::move(options)) {}

  // Allocates consecutive extents in one run of whole pages. Extents smaller than a page may begin anywhere, the
  // others at pages. No size is 0, and the charge was reserved. May create a slab. Throws Failure if there is no room;
  // then nothing is allocated.
  std::vector<Extent> take(const std::vector<std::uint64_t>& sizes);
  // Does the same if the slabs have room; otherwise it allocates nothing. Never blocks.
  std::vector<Extent> try_take(const std::vector<std::uint64_t>& sizes);

  // Reserves bytes of the capacity. Throws Failure.
  void reserve(std::uint64_t bytes);
  void cancel_reservation(std::uint64_t bytes) noexcept;
  static std::uint64_t charge_of(std::uint64_t size) noexcept;  // of an extent of that size
  // Returns the offset of the next extent, of `size` bytes, after one that ends at `end`.
  static std::uint64_t next_offset(std::uint64_t end, std::uint64_t size) noexcept;

  // For a store that is opened again: returns the extent of existing data. Throws Failure if that is impossible.
  Extent adopt(std::uint64_t slab, std::uint64_t offset, std::uint64_t size);
  void finish_adoption();
  // Removes the slabs that no key refers to, or renames them with a prefix, which needs no disk space: prefixed files
  // are not slabs. Returns their old names.
  std::vector<std::string> remove_orphans(const std::optional<std::string>& rename_with);

  // Makes a slab take no more extents. A full disk failed to sync it, so data that was written there and is in no
  // journal may be lost, even if a later sync succeeds.
  void retire(const Slab& slab, const std::exception_ptr& failure) noexcept;
  std::exception_ptr failure_of(const Slab& slab) const noexcept;

  std::uint64_t trim() noexcept;  // returns bytes
  bool has_files() const;         // in the folder, from earlier
  enum class Files : std::uint8_t { stay, go };
  void close(Files files) noexcept;  // when no read or write is in flight
  // Returns the file of a slab, which may close concurrently; null: it could not be opened, or the store is closed.
  static std::shared_ptr<io::File> file_of(const Slab& slab);
  Statistics statistics() const;

 private:
  friend class Extent;
  using SlabPtr = std::shared_ptr<Slab>;

  std::string path_of(std::uint64_t number) const;
  struct Layout {
    std::vector<std::uint64_t> offsets;
    std::uint64_t size = 0;  // whole pages
  };
  static Layout layout_of(const std::vector<std::uint64_t>& sizes);
  std::vector<Extent> extents_in(const SlabPtr& slab, std::uint64_t begin, const Layout& layout,
                                 const std::vector<std::uint64_t>& sizes);
  std::uint64_t bytes_of_files() const;
  SlabPtr grow(std::uint64_t size);
  SlabPtr make_slab(std::uint64_t size);
  std::shared_ptr<io::File> open_file(const std::string& path, io::Start start) const;
  SlabPtr open_slab(std::uint64_t number);
  static void share_pages(Slab& slab, const std::vector<Extent>& extents);
  void release(const Extent& extent) noexcept;

  const Options options_;
  std::mutex growth_;
  mutable std::mutex mutex_;
  std::vector<SlabPtr> slabs_;
  std::uint64_t next_ = 0;     // number; growth_ guards it
  std::uint64_t charged_ = 0;  // bytes of extents and reservations
  std::uint64_t used_ = 0;     // of extents
};

}  // namespace cudafuture::store
