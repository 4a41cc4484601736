// The progress of this process in each process group, in a mapped file: it can be read when the process is stopped or
// dead. `cudafuture/_progress.py` reads it, and has the same layout.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

namespace cudafuture {

// The operations of one issuer on one process group. Threads that issue concurrently on one group have no order, so no
// field needs a lock.
class GroupRecord {
 public:
  // `number`: from 0.
  void issued(std::string_view operation, std::int64_t number) noexcept;
  std::string id() const { return id_; }
  void ended() noexcept { ended_.fetch_add(1, std::memory_order_relaxed); }

 private:
  friend class ProgressFile;

  char name_[64];
  char id_[40];  // the same on all ranks of the group, and of no other group
  std::int32_t rank_;
  std::int32_t size_;
  std::atomic<std::int64_t> issued_;
  std::atomic<std::int64_t> ended_;
  std::atomic<std::int64_t> issued_at_;  // coarse_time()
  char last_[32];                        // name of the operation that was issued last
  char padding_[24];
};

class ProgressFile {
 public:
  static ProgressFile& get() noexcept;

  // Names the process for those who read the file. Negative: unknown.
  void set_rank(int rank, int size) noexcept;
  void set_worker(std::string_view name) noexcept;

  // Called in a forked child: the pages are shared with the parent, so the child gets empty ones of its own.
  void leave_to_parent() noexcept;

  // Adds a group. Returns null if there are too many: they are not recorded.
  GroupRecord* add_group(std::string_view name, std::string_view id, int rank, int size) noexcept;

  // Sets the path of the file, which is made when there is something to keep. Without it the progress is in memory
  // only.
  void set_path(std::string path) noexcept;

  int rank() const noexcept;
  int size() const noexcept;
  std::string worker() const;

 private:
  struct Layout;

  ProgressFile() noexcept;
  void make() noexcept;

  std::mutex mutex_;  // guards the path, the making of the file, and new groups
  std::string path_;  // empty: none yet, or the file is made
  Layout* layout_;
};

}  // namespace cudafuture
