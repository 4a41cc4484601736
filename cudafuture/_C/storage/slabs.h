// The files of a store, and who has which bytes of them.
//
// A slab is a file whose blocks are allocated when it is made. A place is a stretch of bytes in one; the pages that it
// touches belong to it, and are free again when it is dropped. Places that were taken together may share a page.
//
// Slabs that are empty stay for what comes next, as writing over blocks that a file has is fastest. trim() removes
// them; so does taking, when the disk is full.
//
// Locks: mutex_ guards everything, and the kernel is not called under it once the store is open. growth_ is held while
// a slab is made, which may take seconds; mutex_ is taken under it.
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

#include "storage/extents.h"
#include "storage/file.h"

namespace cudafuture::storage {

class Slabs;

struct Slab {
  Slab(std::weak_ptr<Slabs> owner, std::uint64_t number, std::uint64_t size)
      : owner(std::move(owner)), number(number), extents(size) {}

  std::weak_ptr<Slabs> owner;
  std::uint64_t number;
  std::shared_ptr<File> file;  // null: it could not be opened
  std::exception_ptr failure;  // why it could not be opened, or takes no more places
  Extents extents;
  std::unordered_map<std::uint64_t, std::uint32_t>
      shared;  // pages, and how many places touch them when that is not one
};

class Place {
 public:
  Place() = default;  // none
  Place(std::shared_ptr<Slab> slab, std::uint64_t offset, std::uint64_t size, bool has_pages = true) noexcept
      : slab_(std::move(slab)), offset_(offset), size_(size), has_pages_(has_pages) {}
  Place(Place&& other) noexcept { *this = std::move(other); }
  Place& operator=(Place&& other) noexcept {
    std::swap(slab_, other.slab_);
    std::swap(offset_, other.offset_);
    std::swap(size_, other.size_);
    std::swap(has_pages_, other.has_pages_);
    return *this;
  }
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  explicit operator bool() const noexcept { return slab_ != nullptr; }
  const Slab& slab() const noexcept { return *slab_; }
  std::uint64_t offset() const noexcept { return offset_; }
  std::uint64_t size() const noexcept { return size_; }  // bytes

 private:
  friend class Slabs;

  std::shared_ptr<Slab> slab_;
  std::uint64_t offset_ = 0;
  std::uint64_t size_ = 0;
  bool has_pages_ = true;  // false: its file ends before it does, or the store is only read
};

class Slabs : public std::enable_shared_from_this<Slabs> {
 public:
  struct Options {
    std::string folder;
    Direct direct = Direct::automatic;
    bool durable = false;  // then a slab's name is on the disk before anything is written to it
    bool read_only = false;
    std::uint64_t capacity = 0;  // bytes that places may have in all; 0: any number
  };
  struct Statistics {
    std::uint64_t slabs = 0;
    std::uint64_t bytes = 0;  // of their files
    std::uint64_t used = 0;   // of places
  };

  explicit Slabs(Options options) : options_(std::move(options)) {}

  // One place after the other in one stretch of whole pages: those of less than a page anywhere, the others at pages.
  // None is empty, and their charge was reserved. May make a slab. Throws Failure when there is no room; then nothing
  // is taken.
  std::vector<Place> take(const std::vector<std::uint64_t>& sizes);
  // The same where the slabs have room; else none are taken, and nothing blocks.
  std::vector<Place> try_take(const std::vector<std::uint64_t>& sizes);

  // Counts bytes that are to be taken soon against the capacity. Throws Failure.
  void reserve(std::uint64_t bytes);
  void cancel_reservation(std::uint64_t bytes) noexcept;
  static std::uint64_t charge_of(std::uint64_t size) noexcept;  // of a place of so many bytes
  // Where the next one of a stretch begins, of so many bytes, when the one before ends there.
  static std::uint64_t next_offset(std::uint64_t end, std::uint64_t size) noexcept;

  // Of a store that is opened again: the place of what was written before. Throws Failure when it cannot be.
  Place adopt(std::uint64_t slab, std::uint64_t offset, std::uint64_t size);
  void finish_adoption();
  // Removes the slabs that no key has, or renames them, which takes no room on the disk: slabs with a prefix are none.
  // Returns their names before.
  std::vector<std::string> remove_orphans(const std::optional<std::string>& rename_with);

  // Has a slab take no more places: a disk that is full did not sync it, so what was written there and is in no journal
  // may be lost, though a later sync succeeds.
  void retire(const Slab& slab, const std::exception_ptr& failure) noexcept;
  std::exception_ptr failure_of(const Slab& slab) const noexcept;

  std::uint64_t trim() noexcept;  // returns bytes
  bool has_files() const;         // in the folder, from before
  enum class Files : std::uint8_t { stay, go };
  void close(Files files) noexcept;  // when nothing is read or written any more
  // The file of a slab, which perhaps is closing meanwhile; null: it could not be opened, or the store is closed.
  static std::shared_ptr<File> file_of(const Slab& slab);
  Statistics statistics() const;

 private:
  friend class Place;
  using SlabPtr = std::shared_ptr<Slab>;

  std::string path_of(std::uint64_t number) const;
  struct Layout {
    std::vector<std::uint64_t> offsets;
    std::uint64_t size = 0;  // whole pages
  };
  static Layout layout_of(const std::vector<std::uint64_t>& sizes);
  std::vector<Place> places_in(const SlabPtr& slab, std::uint64_t begin, const Layout& layout,
                               const std::vector<std::uint64_t>& sizes);
  std::uint64_t bytes_of_files() const;
  SlabPtr grow(std::uint64_t size);
  SlabPtr make_slab(std::uint64_t size);
  std::shared_ptr<File> open_file(const std::string& path, Start start) const;
  SlabPtr open_slab(std::uint64_t number);
  static void share_pages(Slab& slab, const std::vector<Place>& places);
  void give_back(const Place& place) noexcept;

  const Options options_;
  std::mutex growth_;
  mutable std::mutex mutex_;
  std::vector<SlabPtr> slabs_;
  std::uint64_t next_ = 0;     // number; growth_ guards it
  std::uint64_t charged_ = 0;  // bytes of places and reservations
  std::uint64_t used_ = 0;     // of places
};

}  // namespace cudafuture::storage
