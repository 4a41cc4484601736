#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "io/failure.h"
#include "io/page.h"

namespace cudafuture::io {
namespace {

int flags_of(Access access) {
  switch (access) {
    case Access::read:
      return O_RDONLY | O_CLOEXEC;
    case Access::write:
      return O_WRONLY | O_CLOEXEC;
    case Access::read_write:
      return O_RDWR | O_CLOEXEC;
  }
  return O_RDONLY | O_CLOEXEC;
}

int flags_of(Start start) {
  switch (start) {
    case Start::existing:
      return 0;
    case Start::empty:
      return O_CREAT | O_TRUNC;
    case Start::fresh:
      return O_CREAT | O_EXCL;
  }
  return 0;
}

int open_file(const std::string& path, int flags) {
  int descriptor;
  do {
    descriptor = ::open(path.c_str(), flags, 0666);
  } while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

// Returns the kernel's answer (since Linux 6.1); before that, an alignment that suits nearly all devices.
Alignment alignment_of(int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx status = {};
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN) != 0) {
    return {status.stx_dio_offset_align, status.stx_dio_mem_align};
  }
#endif
  (void)descriptor;
  return {kPage, kPage};
}

// Tries a direct read. Some file systems open a file for direct I/O and then refuse to do it.
bool can_read_directly(int descriptor, const Alignment& alignment) {
  const std::size_t size = std::max({kPage, alignment.offset, alignment.memory});
  void* memory = nullptr;
  if (::posix_memalign(&memory, size, size) != 0) return false;
  ssize_t got;
  do {
    got = ::pread(descriptor, memory, size, 0);
  } while (got < 0 && errno == EINTR);
  std::free(memory);
  return got >= 0;
}

}  // namespace

std::shared_ptr<File> File::open(const std::string& path, Access access, Start start, Direct direct) {
  return std::shared_ptr<File>(new File(path, access, start, direct));
}

File::File(std::string path, Access access, Start start, Direct direct)
    : path_(std::move(path)), access_(access), must_be_direct_(direct == Direct::yes) {
  cached_ = open_file(path_, flags_of(access) | flags_of(start));
  if (cached_ < 0) throw_errno("cannot open", path_, errno);
  if (direct == Direct::no) return;
  const int code = open_past_cache();
  const bool is_refused = code == EINVAL || code == EOPNOTSUPP;  // by the file system
  if (code == 0 || (is_refused && direct != Direct::yes)) return;
  ::close(cached_);
  if (start == Start::fresh) ::unlink(path_.c_str());
  throw_errno(is_refused ? "no direct I/O for" : "cannot open", path_, code);
}

// Returns an errno, or 0.
int File::open_past_cache() noexcept {
  direct_ = open_file(path_, flags_of(access_) | O_DIRECT);
  if (direct_ < 0) return errno;
  alignment_ = alignment_of(direct_);
  if (alignment_.offset == 0 || alignment_.memory == 0 ||
      (access_ != Access::write && !can_read_directly(direct_, alignment_))) {
    ::close(std::exchange(direct_, -1));
    return EINVAL;
  }
  unit_ = std::max({kPage, alignment_.offset, alignment_.memory});
  is_direct_.store(true, std::memory_order_relaxed);
  return 0;
}

File::~File() { close(); }

bool File::begin_use() noexcept {
  std::uint64_t before = uses_.load(std::memory_order_relaxed);
  while ((before & kClosed) == 0) {
    if (uses_.compare_exchange_weak(before, before + 1, std::memory_order_acquire)) return true;
  }
  return false;
}

void File::end_use() noexcept {
  if (uses_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1)) close_descriptors();
}

File::Use File::expect_open() {
  Use use(*this);
  if (!use) throw Error(ErrorKind::invalid_state, "the file is closed: " + path_);
  return use;
}

void File::close() noexcept {
  if (uses_.fetch_or(kClosed, std::memory_order_acq_rel) == 0) close_descriptors();
}

void File::close_descriptors() noexcept {
  if (direct_ >= 0) ::close(std::exchange(direct_, -1));
  ::close(std::exchange(cached_, -1));
}

std::uint64_t File::size() {
  const Use use = expect_open();
  struct stat status = {};
  if (::fstat(cached_, &status) != 0) throw_errno("cannot get the size of", path_, errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void File::allocate(std::uint64_t size) {
  const Use use = expect_open();
  int code;
  do {
    code = ::posix_fallocate(cached_, 0, static_cast<off_t>(size));
  } while (code == EINTR);
  if (code != 0) throw_errno("cannot allocate", path_, code);
}

void File::truncate(std::uint64_t size) {
  const Use use = expect_open();
  int code;
  do {
    code = ::ftruncate(cached_, static_cast<off_t>(size));
  } while (code != 0 && errno == EINTR);
  if (code != 0) throw_errno("cannot truncate", path_, errno);
}

void File::sync() {
  const Use use = expect_open();
  if (::fdatasync(cached_) != 0) throw_errno("cannot sync", path_, errno);
}

}  // namespace cudafuture::io
