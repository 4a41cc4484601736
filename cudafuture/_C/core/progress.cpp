#include "core/progress.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/coarse_clock.h"

namespace cudafuture {
namespace {

constexpr int kMostGroups = 512;

template <std::size_t Size>
void put_text(char (&field)[Size], std::string_view text) noexcept {
  const std::size_t length = std::min(text.size(), Size - 1);
  std::memcpy(field, text.data(), length);
  field[length] = '\0';
}

}  // namespace

struct ProgressFile::Layout {
  char magic[8];
  std::int32_t process;
  std::int32_t rank;
  std::int32_t size;
  std::atomic<std::int32_t> groups;
  char worker[64];
  char padding[104];
  GroupRecord group[kMostGroups];
};

void GroupRecord::issued(std::string_view operation, std::int64_t number) noexcept {
  put_text(last_, operation);
  issued_at_.store(coarse_time(), std::memory_order_relaxed);
  issued_.store(number + 1, std::memory_order_relaxed);
}

// The pages stay in place when make() maps the file over them.
ProgressFile::ProgressFile() noexcept {
  static_assert(sizeof(GroupRecord) == 192 && sizeof(Layout) == 192 + kMostGroups * sizeof(GroupRecord));
  void* const pages = mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  layout_ = pages == MAP_FAILED ? new Layout{} : static_cast<Layout*>(pages);
  std::memcpy(layout_->magic, "cfprog1", 8);
  layout_->rank = layout_->size = -1;
}

ProgressFile& ProgressFile::get() noexcept {
  static auto* progress = new ProgressFile;  // leaked: engines run until the end of the process
  return *progress;
}

void ProgressFile::set_path(std::string path) noexcept {
  std::lock_guard lock(mutex_);
  path_ = std::move(path);
  if (layout_->groups.load(std::memory_order_relaxed) > 0 || layout_->rank >= 0 || layout_->worker[0] != '\0') make();
}

void ProgressFile::leave_to_parent() noexcept {
  new (&mutex_) std::mutex;  // it may have been held by a thread that does not exist here
  void* const pages =
      mmap(layout_, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (pages == MAP_FAILED) return;
  std::memcpy(layout_->magic, "cfprog1", 8);
  layout_->rank = layout_->size = -1;
}

void ProgressFile::set_rank(int rank, int size) noexcept {
  std::lock_guard lock(mutex_);
  layout_->rank = rank;
  layout_->size = size;
  make();
}
void ProgressFile::set_worker(std::string_view name) noexcept {
  std::lock_guard lock(mutex_);
  put_text(layout_->worker, name);
  make();
}
int ProgressFile::rank() const noexcept { return layout_->rank; }
int ProgressFile::size() const noexcept { return layout_->size; }
std::string ProgressFile::worker() const { return layout_->worker; }

GroupRecord* ProgressFile::add_group(std::string_view name, std::string_view id, int rank, int size) noexcept {
  std::lock_guard lock(mutex_);
  make();
  const int number = layout_->groups.load(std::memory_order_relaxed);
  if (number == kMostGroups) return nullptr;
  GroupRecord& group = layout_->group[number];
  put_text(group.name_, name);
  put_text(group.id_, id);
  group.rank_ = rank;
  group.size_ = size;
  layout_->groups.store(number + 1, std::memory_order_release);
  return &group;
}

// Moves the progress into the file, unless it is there. Called under the lock.
void ProgressFile::make() noexcept {
  if (path_.empty()) return;
  const std::string path = std::move(path_);
  path_.clear();
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return;
  layout_->process = static_cast<std::int32_t>(getpid());
  if (ftruncate(fd, sizeof(Layout)) == 0 && write(fd, layout_, sizeof(Layout)) == sizeof(Layout))
    mmap(layout_, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  close(fd);
}

}  // namespace cudafuture
