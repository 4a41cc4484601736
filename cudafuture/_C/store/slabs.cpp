#include "store/slabs.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <iterator>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/process.h"
#include "io/failure.h"
#include "io/page.h"
#include "store/folder.h"

namespace cudafuture::store {

using namespace io;

namespace {

constexpr std::uint64_t kSmallestSlab = 16 << 20;
constexpr std::uint64_t kLargestSlab = 1 << 30;
constexpr std::uint64_t kLine = 64;  // extents smaller than a page begin at multiples of this
constexpr char kPrefix[] = "slab-";

struct Pages {
  std::uint64_t first;
  std::uint64_t last;
};
Pages pages_of(std::uint64_t offset, std::uint64_t size) { return {offset / kPage, (offset + size - 1) / kPage}; }

// Returns the number of a slab's file name; none: the name is not a slab's.
std::optional<std::uint64_t> number_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(sizeof kPrefix - 1);
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  return error == std::errc() && end == name.data() + name.size() ? std::optional(number) : std::nullopt;
}

}  // namespace

Extent::~Extent() {
  if (slab_ == nullptr) return;
  if (const std::shared_ptr<Slabs> slabs = slab_->owner.lock()) slabs->release(*this);
}

std::uint64_t Slabs::charge_of(std::uint64_t size) noexcept { return ceil_to(size, size < kPage ? kLine : kPage); }

std::uint64_t Slabs::next_offset(std::uint64_t end, std::uint64_t size) noexcept {
  return ceil_to(end, size < kPage ? kLine : kPage);
}

std::string Slabs::path_of(std::uint64_t number) const {
  char name[32];
  std::snprintf(name, sizeof name, "/%s%08llu", kPrefix, static_cast<unsigned long long>(number));
  return options_.folder + name;
}

void Slabs::reserve(std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (options_.capacity != 0 && bytes > options_.capacity - std::min(options_.capacity, charged_)) {
    throw Failure("no room for " + std::to_string(bytes) + " bytes: " + std::to_string(charged_) + " of " +
                      std::to_string(options_.capacity) + " are in use",
                  EDQUOT, options_.folder, 0, bytes, 0, FailureKind::quota);
  }
  charged_ += bytes;
}

void Slabs::cancel_reservation(std::uint64_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  charged_ -= bytes;
}

Slabs::Layout Slabs::layout_of(const std::vector<std::uint64_t>& sizes) {
  Layout layout;
  std::uint64_t end = 0;
  for (const std::uint64_t size : sizes) {
    layout.offsets.push_back(next_offset(end, size));
    end = layout.offsets.back() + size;
  }
  layout.size = ceil_to(end, kPage);
  return layout;
}

std::vector<Extent> Slabs::try_take(const std::vector<std::uint64_t>& sizes) {
  const Layout layout = layout_of(sizes);
  std::lock_guard lock(mutex_);
  for (const SlabPtr& slab : slabs_) {
    if (slab->file == nullptr || slab->failure != nullptr) continue;
    if (const auto begin = slab->free_space.take(layout.size)) return extents_in(slab, *begin, layout, sizes);
  }
  return {};
}

std::vector<Extent> Slabs::take(const std::vector<std::uint64_t>& sizes) {
  if (std::vector<Extent> extents = try_take(sizes); !extents.empty()) return extents;
  std::lock_guard growth(growth_);
  if (std::vector<Extent> extents = try_take(sizes); !extents.empty())
    return extents;  // another thread has created a slab
  const Layout layout = layout_of(sizes);
  const SlabPtr slab = grow(layout.size);
  std::lock_guard lock(mutex_);
  slabs_.push_back(slab);
  return extents_in(slab, slab->free_space.take(layout.size).value(), layout, sizes);
}

std::vector<Extent> Slabs::extents_in(const SlabPtr& slab, std::uint64_t begin, const Layout& layout,
                                      const std::vector<std::uint64_t>& sizes) {
  std::vector<Extent> extents;
  extents.reserve(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    extents.emplace_back(slab, begin + layout.offsets[i], sizes[i]);
    used_ += sizes[i];
  }
  share_pages(*slab, extents);
  return extents;
}

// Notes the pages that several extents touch. The extents are in order.
void Slabs::share_pages(Slab& slab, const std::vector<Extent>& extents) {
  std::uint64_t last = ~std::uint64_t{0};
  for (const Extent& extent : extents) {
    const Pages pages = pages_of(extent.offset(), extent.size());
    if (pages.first == last) ++slab.shared.try_emplace(last, 1).first->second;
    last = pages.last;
  }
}

std::uint64_t Slabs::bytes_of_files() const {
  std::lock_guard lock(mutex_);
  std::uint64_t bytes = 0;
  for (const SlabPtr& slab : slabs_) bytes += slab->free_space.size();
  return bytes;
}

// The larger the store, the larger the new slab. If the disk has no room for it, a smaller one may fit.
Slabs::SlabPtr Slabs::grow(std::uint64_t size) {
  const std::uint64_t capacity = ceil_to(options_.capacity, kPage);
  // Empty slabs stay while there is room for more; the capacity may leave no room.
  if (capacity != 0 && size + bytes_of_files() > capacity) trim();
  const std::uint64_t all = bytes_of_files();
  const std::uint64_t most = std::max(kLargestSlab, all / 16);  // each slab has two descriptors
  std::uint64_t wanted = std::max(size, std::clamp(all, kSmallestSlab, most));
  if (capacity != 0) {
    const std::uint64_t left = capacity - std::min(capacity, all);
    if (size > left) {
      throw Failure(
          "no room for " + std::to_string(size) + " bytes in one piece within " + std::to_string(options_.capacity),
          EDQUOT, options_.folder, 0, size, 0, FailureKind::quota);
    }
    wanted = std::min(wanted, left);
  }
  for (bool has_trimmed = false;; wanted = std::max(size, ceil_to(wanted / 2, kPage))) {
    try {
      return make_slab(wanted);
    } catch (const Failure& failure) {
      if (failure.code() != ENOSPC && failure.code() != EFBIG && failure.code() != EDQUOT) throw;
      if (!std::exchange(has_trimmed, true)) {
        trim();
      } else if (wanted == size) {
        throw;
      }
    }
  }
}

// Extents begin at pages: a file whose direct I/O needs larger units goes through the page cache.
std::shared_ptr<File> Slabs::open_file(const std::string& path, Start start) const {
  const Access access = options_.read_only ? Access::read : Access::read_write;
  auto file = File::open(path, access, start, options_.direct);
  if (!file->is_direct() || file->unit() <= kPage) return file;
  if (options_.direct == Direct::yes) {
    throw Failure(path + ": direct I/O there is of " + std::to_string(file->unit()) + " bytes, more than a page",
                  EINVAL, path);
  }
  return File::open(path, access, Start::existing, Direct::no);
}

Slabs::SlabPtr Slabs::make_slab(std::uint64_t size) {
  while (::access(path_of(next_).c_str(), F_OK) == 0) ++next_;  // files that could not be removed
  auto slab = std::make_shared<Slab>(weak_from_this(), next_, size);
  const std::string path = path_of(next_);
  try {
    slab->file = open_file(path, Start::fresh);
    slab->file->allocate(size);
    if (options_.durable) sync_folder(options_.folder);
  } catch (...) {
    if (slab->file != nullptr) ::unlink(path.c_str());
    throw;
  }
  ++next_;
  return slab;
}

// ---- adoption of existing files

Slabs::SlabPtr Slabs::open_slab(std::uint64_t number) {
  const auto known =
      std::find_if(slabs_.begin(), slabs_.end(), [number](const SlabPtr& slab) { return slab->number == number; });
  if (known != slabs_.end()) return *known;
  SlabPtr slab;
  try {
    auto file = open_file(path_of(number), Start::existing);
    // Waits for direct writes that a killed process left with the kernel: they may go to extents that are free now.
    if (!options_.read_only) {
      file->truncate(file->size() + kPage);
      file->truncate(file->size() - kPage);
    }
    slab = std::make_shared<Slab>(weak_from_this(), number, file->size() / kPage * kPage);
    slab->file = std::move(file);
  } catch (...) {
    slab = std::make_shared<Slab>(weak_from_this(), number, 0);
    slab->failure = std::current_exception();
  }
  next_ = std::max(next_, number + 1);
  slabs_.push_back(slab);
  return slab;
}

Extent Slabs::adopt(std::uint64_t number, std::uint64_t offset, std::uint64_t size) {
  std::lock_guard lock(mutex_);
  const SlabPtr slab = open_slab(number);
  const bool has_pages = !options_.read_only && ceil_to(offset + size, kPage) <= slab->free_space.size();
  if (has_pages) {
    // The first and the last page may also belong to another extent. Both are counted; finish_adoption() forgets those
    // with one.
    Pages pages = pages_of(offset, size);
    const bool has_one = pages.first == pages.last;
    if (slab->shared[pages.first]++ != 0) ++pages.first;
    if (!has_one && slab->shared[pages.last]++ != 0) --pages.last;
    if (pages.first <= pages.last &&
        !slab->free_space.take_at(pages.first * kPage, (pages.last - pages.first + 1) * kPage)) {
      throw Failure("two keys have the same extent in " + path_of(number), 0, path_of(number), offset, size, 0,
                    FailureKind::checksum);
    }
  }
  charged_ += charge_of(size);
  used_ += size;
  return {slab, offset, size, has_pages};
}

void Slabs::finish_adoption() {
  std::lock_guard lock(mutex_);
  for (const SlabPtr& slab : slabs_) std::erase_if(slab->shared, [](const auto& page) { return page.second == 1; });
}

std::vector<std::string> Slabs::remove_orphans(const std::optional<std::string>& rename_with) {
  std::lock_guard lock(mutex_);
  std::vector<std::string> orphans;
  for (const std::string& name : names_in(options_.folder)) {
    const std::optional<std::uint64_t> number = number_of(name);
    const auto is_it = [number](const SlabPtr& slab) { return slab->number == *number; };
    if (!number || std::any_of(slabs_.begin(), slabs_.end(), is_it)) continue;
    const std::string path = options_.folder + "/" + name;
    if (!rename_with) {
      ::unlink(path.c_str());
    } else if (::rename(path.c_str(), (options_.folder + "/" + *rename_with + name).c_str()) != 0) {
      throw_errno("cannot rename", path, errno);
    }
    orphans.push_back(name);
  }
  return orphans;
}

// ---- giving back

void Slabs::release(const Extent& extent) noexcept {
  if (is_forked_child()) return;  // everything belongs to the parent
  std::lock_guard lock(mutex_);
  charged_ -= charge_of(extent.size());
  used_ -= extent.size();
  if (!extent.has_pages_) return;
  Slab& slab = *extent.slab_;
  const auto is_still_used = [&slab](std::uint64_t page) {
    const auto shared = slab.shared.find(page);
    if (shared == slab.shared.end()) return false;
    if (--shared->second > 0) return true;
    slab.shared.erase(shared);
    return false;
  };
  Pages pages = pages_of(extent.offset(), extent.size());
  const bool has_one = pages.first == pages.last;
  const bool keeps_first = is_still_used(pages.first);
  const bool keeps_last = !has_one && is_still_used(pages.last);
  if (keeps_first) ++pages.first;
  if (keeps_last) --pages.last;
  if (pages.first > pages.last) return;
  slab.free_space.release(pages.first * kPage, (pages.last - pages.first + 1) * kPage);
}

void Slabs::retire(const Slab& slab, const std::exception_ptr& failure) noexcept {
  std::lock_guard lock(mutex_);
  for (const SlabPtr& known : slabs_) {
    if (known.get() == &slab) known->failure = failure;
  }
}

std::exception_ptr Slabs::failure_of(const Slab& slab) const noexcept {
  std::lock_guard lock(mutex_);
  return slab.failure;
}

std::uint64_t Slabs::trim() noexcept {
  if (options_.read_only) return 0;  // its extents count no pages
  const auto is_empty = [](const SlabPtr& slab) {
    return slab->free_space.free() == slab->free_space.size() && slab->file != nullptr;
  };
  std::vector<SlabPtr> empty;
  {
    std::lock_guard lock(mutex_);
    std::copy_if(slabs_.begin(), slabs_.end(), std::back_inserter(empty), is_empty);
    std::erase_if(slabs_, is_empty);
  }
  std::uint64_t bytes = 0;
  for (const SlabPtr& slab : empty) {
    bytes += slab->free_space.size();
    ::unlink(slab->file->path().c_str());
  }
  return bytes;
}

std::shared_ptr<File> Slabs::file_of(const Slab& slab) {
  const std::shared_ptr<Slabs> slabs = slab.owner.lock();
  if (slabs == nullptr) return nullptr;
  std::lock_guard lock(slabs->mutex_);
  return slab.file;
}

void Slabs::close(Files files) noexcept {
  if (is_forked_child()) return;
  std::lock_guard lock(mutex_);
  for (const SlabPtr& slab : slabs_) {
    if (files == Files::go) ::unlink(path_of(slab->number).c_str());
    slab->file = nullptr;
  }
}

bool Slabs::has_files() const {
  const std::vector<std::string> names = names_in(options_.folder);
  return std::any_of(names.begin(), names.end(), [](const std::string& name) { return number_of(name).has_value(); });
}

Slabs::Statistics Slabs::statistics() const {
  std::lock_guard lock(mutex_);
  Statistics s;
  s.slabs = slabs_.size();
  s.used = used_;
  for (const SlabPtr& slab : slabs_) s.bytes += slab->free_space.size();
  return s;
}

}  // namespace cudafuture::store
