// A file that an engine reads and writes: open for direct I/O, through the page cache, or both.
//
// In a file that is open for direct I/O, whole units are transferred directly; a part of a unit goes through the page
// cache. A unit is at least a page. So neighbours that do not overlap never write one page both ways, which could lose
// data.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace cudafuture::io {

enum class Access : std::uint8_t { read, write, read_write };
enum class Start : std::uint8_t { existing, empty, fresh };  // empty: created if missing; fresh: it must not exist
enum class Direct : std::uint8_t { automatic, yes, no };

// The alignment that direct I/O needs on the file's device; zeros: not supported.
struct Alignment {
  std::size_t offset = 0;  // of offsets and sizes, in bytes
  std::size_t memory = 0;  // of addresses
};

class File {
 public:
  // Throws Failure; with Direct::yes also if the file system has no direct I/O.
  static std::shared_ptr<File> open(const std::string& path, Access access, Start start, Direct direct);

  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const noexcept { return path_; }
  Access access() const noexcept { return access_; }
  int through_cache() const noexcept { return cached_; }
  int past_cache() const noexcept { return direct_; }
  // Returns true while transfers use direct I/O. It can change: a file system may refuse direct I/O later.
  bool is_direct() const noexcept { return is_direct_.load(std::memory_order_relaxed); }
  bool must_be_direct() const noexcept { return must_be_direct_; }
  void fall_back() noexcept { is_direct_.store(false, std::memory_order_relaxed); }
  std::size_t unit() const noexcept { return unit_; }
  const Alignment& alignment() const noexcept { return alignment_; }

  // All of these throw Failure, and Error if the file is closed.
  std::uint64_t size();               // bytes
  void allocate(std::uint64_t size);  // allocates that many bytes of blocks, and extends the file to at least that size
  void truncate(std::uint64_t size);
  void sync();  // data, and the metadata needed to read it

  // Keeps the descriptors open while it exists.
  class Use {
   public:
    Use() = default;
    explicit Use(File& file) noexcept : file_(file.begin_use() ? &file : nullptr) {}
    Use(Use&& other) noexcept : file_(std::exchange(other.file_, nullptr)) {}
    Use& operator=(Use&& other) noexcept {
      std::swap(file_, other.file_);
      return *this;
    }
    ~Use() {
      if (file_ != nullptr) file_->end_use();
    }
    explicit operator bool() const noexcept { return file_ != nullptr; }  // false: the file is closed

   private:
    File* file_ = nullptr;
  };

  // Refuses further uses. The end of the last use closes the descriptors.
  void close() noexcept;

 private:
  File(std::string path, Access access, Start start, Direct direct);
  int open_past_cache() noexcept;
  bool begin_use() noexcept;
  void end_use() noexcept;
  Use expect_open();
  void close_descriptors() noexcept;

  static constexpr std::uint64_t kClosed = std::uint64_t{1} << 63;

  std::string path_;
  Access access_;
  int cached_ = -1;
  int direct_ = -1;
  Alignment alignment_;
  std::size_t unit_ = 0;
  bool must_be_direct_;
  std::atomic<bool> is_direct_{false};
  std::atomic<std::uint64_t> uses_{0};  // uses in progress, and kClosed
};

}  // namespace cudafuture::io
