#include "io/memory.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace cudafuture::io {
namespace {

at::Tensor slice(const at::Tensor& bytes, std::size_t at, std::size_t size) {
  return bytes.narrow(0, static_cast<std::int64_t>(at), static_cast<std::int64_t>(size));
}

// Bytes on a device, and their place in a pinned tensor.
struct OnDevice {
  std::size_t at;
  at::Tensor bytes;

  std::size_t end() const { return at + bytes.nbytes(); }
};

// Bytes that one copy moves between a device and a pinned tensor, through a tensor on the device.
using Together = std::vector<OnDevice>;

bool may_join(const Together& together, const at::Tensor& bytes) {
  constexpr std::size_t kSmall = 64 * 1024;  // bytes; copying more than this twice is slower than a separate copy
  if (together.empty()) return true;
  const at::Tensor& last = together.back().bytes;
  return last.nbytes() <= kSmall && bytes.nbytes() <= kSmall && last.device() == bytes.device();
}

at::Tensor place_of(const Together& together, const at::Tensor& pinned) {
  return slice(pinned, together.front().at, together.back().end() - together.front().at);
}

// Returns all parts in one tensor on the device, with zeros between them.
at::Tensor joined(const Together& together) {
  std::size_t widest = 0;
  for (std::size_t i = 1; i < together.size(); ++i) {
    widest = std::max(widest, together[i].at - together[i - 1].end());
  }
  const at::Tensor zeros = at::zeros({static_cast<std::int64_t>(widest)}, together.front().bytes.options());
  std::vector<at::Tensor> parts = {together.front().bytes};
  for (std::size_t i = 1; i < together.size(); ++i) {
    if (const std::size_t gap = together[i].at - together[i - 1].end(); gap > 0) parts.push_back(slice(zeros, 0, gap));
    parts.push_back(together[i].bytes);
  }
  return at::cat(parts);
}

void gather_together(Together& together, const at::Tensor& into) {
  if (together.empty()) return;
  at::Tensor all = together.front().bytes;
  if (together.size() > 1) {
    try {
      all = joined(together);
    } catch (const c10::OutOfMemoryError&) {  // separate copies need no device memory
      for (const OnDevice& part : together) slice(into, part.at, part.bytes.nbytes()).copy_(part.bytes, true);
      return together.clear();
    }
  }
  place_of(together, into).copy_(all, /*non_blocking=*/true);
  together.clear();
}

void scatter_together(Together& together, const at::Tensor& from) {
  if (together.empty()) return;
  const at::Tensor place = place_of(together, from);
  at::Tensor all;
  if (together.size() > 1) {
    try {
      all = at::empty(place.sizes(), together.front().bytes.options());
    } catch (const c10::OutOfMemoryError&) {  // separate copies need no device memory
    }
  }
  if (!all.defined()) {
    for (const OnDevice& part : together) part.bytes.copy_(slice(from, part.at, part.bytes.nbytes()), true);
    return together.clear();
  }
  all.copy_(place, /*non_blocking=*/true);
  std::vector<at::Tensor> parts, sources;
  for (const OnDevice& part : together) {
    parts.push_back(part.bytes);
    sources.push_back(slice(all, part.at - together.front().at, part.bytes.nbytes()));
  }
  at::_foreach_copy_(parts, sources, /*non_blocking=*/true);
  together.clear();
}

}  // namespace

void Memory::add(void* data, std::size_t size) {
  if (size == 0) return;
  pieces_.push_back({static_cast<std::byte*>(data), size_, size, size, {}, {}});
  size_ += size;
}

void Memory::add_strided(void* data, std::size_t item, const std::int64_t* sizes, const std::int64_t* strides,
                         std::size_t dims) {
  Piece piece{static_cast<std::byte*>(data), size_, item, item, {}, {}};
  for (std::size_t i = 0; i < dims; ++i) {
    const auto size = static_cast<std::size_t>(sizes[i]);
    piece.size *= size;
    if (size != 1) piece.outer.push_back({size, strides[i] * static_cast<std::ptrdiff_t>(item)});
  }
  if (piece.size == 0) return;
  // The innermost dimensions without gaps form one run.
  while (!piece.outer.empty() && piece.outer.back().stride == static_cast<std::ptrdiff_t>(piece.run)) {
    piece.run *= piece.outer.back().size;
    piece.outer.pop_back();
  }
  size_ += piece.size;
  pieces_.push_back(std::move(piece));
}

void Memory::add_on_device(at::Tensor bytes) {
  const std::size_t size = bytes.nbytes();
  if (size == 0) return;
  pieces_.push_back({nullptr, size_, size, size, {}, std::move(bytes)});
  size_ += size;
}

void Memory::skip(std::size_t size) {
  if (size == 0) return;
  pieces_.push_back({nullptr, size_, size, size, {}, {}});
  size_ += size;
}

void Memory::add(Memory&& more) {
  for (Piece& piece : more.pieces_) {
    piece.begin += size_;
    pieces_.push_back(std::move(piece));
  }
  size_ += std::exchange(more.size_, 0);
  more.pieces_.clear();
}

std::size_t Memory::find(std::size_t at) const noexcept {
  const auto after = std::upper_bound(pieces_.begin(), pieces_.end(), at,
                                      [](std::size_t value, const Piece& piece) { return value < piece.begin; });
  return static_cast<std::size_t>(after - pieces_.begin()) - 1;
}

std::size_t Memory::pieces(std::size_t at, std::size_t size, iovec* into, std::size_t most) const noexcept {
  std::size_t count = 0;
  for (std::size_t i = find(at); size > 0; ++i) {
    const Piece& piece = pieces_[i];
    if (count == most || !piece.outer.empty() || piece.data == nullptr) return 0;
    const std::size_t skipped = at - piece.begin;
    const std::size_t part = std::min(size, piece.size - skipped);
    into[count++] = {piece.data + skipped, part};
    at += part;
    size -= part;
  }
  return count;
}

template <class Copy>
void Memory::walk_strided(const Piece& piece, std::size_t at, std::size_t size, Copy&& copy) noexcept {
  c10::SmallVector<std::size_t, 8> index(piece.outer.size());
  std::size_t number = at / piece.run;  // of the run
  std::size_t skipped = at % piece.run;
  std::byte* data = piece.data;
  for (std::size_t i = index.size(); i-- > 0;) {
    const Dim& dim = piece.outer[i];
    index[i] = number % dim.size;
    number /= dim.size;
    data += static_cast<std::ptrdiff_t>(index[i]) * dim.stride;
  }
  while (true) {
    const std::size_t part = std::min(size, piece.run - skipped);
    copy(data + skipped, part);
    skipped = 0;
    size -= part;
    if (size == 0) return;
    for (std::size_t i = index.size(); i-- > 0;) {  // advance to the next run, like an odometer
      const Dim& dim = piece.outer[i];
      data += dim.stride;
      if (++index[i] < dim.size) break;
      data -= static_cast<std::ptrdiff_t>(dim.size) * dim.stride;
      index[i] = 0;
    }
  }
}

template <class Copy>
void Memory::walk(const Piece& piece, std::size_t at, std::size_t size, Copy&& copy) noexcept {
  if (piece.outer.empty()) {
    copy(piece.data + at, size);
  } else {
    walk_strided(piece, at, size, copy);
  }
}

// Calls visit(piece, offset in it, bytes) for each piece.
template <class Visit>
void Memory::visit(std::size_t at, std::size_t size, Visit&& visit) const {
  for (std::size_t i = find(at); size > 0; ++i) {
    const Piece& piece = pieces_[i];
    const std::size_t skipped = at - piece.begin;
    const std::size_t part = std::min(size, piece.size - skipped);
    visit(piece, skipped, part);
    at += part;
    size -= part;
  }
}

bool Memory::is_on_device(std::size_t at, std::size_t size) const noexcept {
  bool found = false;
  visit(at, size, [&found](const Piece& piece, std::size_t, std::size_t) { found |= piece.on_device.defined(); });
  return found;
}

void Memory::gather(std::size_t at, std::size_t size, std::byte* into) const noexcept {
  const auto copy = [&into](const std::byte* data, std::size_t part) {
    std::memcpy(into, data, part);
    into += part;
  };
  visit(at, size, [&](const Piece& piece, std::size_t skipped, std::size_t part) {
    if (piece.data != nullptr) return walk(piece, skipped, part, copy);
    std::memset(into, 0, part);
    into += part;
  });
}

void Memory::scatter(std::size_t at, std::size_t size, const std::byte* from) const noexcept {
  const auto copy = [&from](std::byte* data, std::size_t part) {
    std::memcpy(data, from, part);
    from += part;
  };
  visit(at, size, [&](const Piece& piece, std::size_t skipped, std::size_t part) {
    if (piece.data != nullptr) return walk(piece, skipped, part, copy);
    from += part;
  });
}

void Memory::gather(std::size_t at, std::size_t size, const at::Tensor& into) const {
  auto* const begin = static_cast<std::byte*>(into.mutable_data_ptr());
  std::size_t done = 0;
  Together together;
  visit(at, size, [&](const Piece& piece, std::size_t skipped, std::size_t part) {
    if (piece.on_device.defined()) {
      at::Tensor bytes = slice(piece.on_device, skipped, part);
      if (!may_join(together, bytes)) gather_together(together, into);
      together.push_back({done, std::move(bytes)});
    } else {
      if (piece.data != nullptr) gather_together(together, into);  // host memory separates them
      gather(piece.begin + skipped, part, begin + done);
    }
    done += part;
  });
  gather_together(together, into);
}

void Memory::scatter(std::size_t at, std::size_t size, const at::Tensor& from) const {
  const auto* const begin = static_cast<const std::byte*>(from.const_data_ptr());
  std::size_t done = 0;
  Together together;
  visit(at, size, [&](const Piece& piece, std::size_t skipped, std::size_t part) {
    if (piece.on_device.defined()) {
      at::Tensor bytes = slice(piece.on_device, skipped, part);
      if (!may_join(together, bytes)) scatter_together(together, from);
      together.push_back({done, std::move(bytes)});
    } else {
      if (piece.data != nullptr) scatter_together(together, from);  // host memory separates them
      scatter(piece.begin + skipped, part, begin + done);
    }
    done += part;
  });
  scatter_together(together, from);
}

}  // namespace cudafuture::io
