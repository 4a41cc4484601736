#include "storage/memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cudafuture::storage {

void Memory::add(void* data, std::size_t size) {
  if (size == 0) return;
  pieces_.push_back({static_cast<std::byte*>(data), size_, size, size, {}});
  size_ += size;
}

void Memory::add_strided(void* data, std::size_t item, const std::int64_t* sizes, const std::int64_t* strides,
                         std::size_t dims) {
  Piece piece{static_cast<std::byte*>(data), size_, item, item, {}};
  for (std::size_t i = 0; i < dims; ++i) {
    const auto size = static_cast<std::size_t>(sizes[i]);
    piece.size *= size;
    if (size != 1) piece.outer.push_back({size, strides[i] * static_cast<std::ptrdiff_t>(item)});
  }
  if (piece.size == 0) return;
  // The innermost dimensions that lie without gaps are one run.
  while (!piece.outer.empty() && piece.outer.back().stride == static_cast<std::ptrdiff_t>(piece.run)) {
    piece.run *= piece.outer.back().size;
    piece.outer.pop_back();
  }
  size_ += piece.size;
  pieces_.push_back(std::move(piece));
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
    if (count == most || !piece.outer.empty()) return 0;
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
    for (std::size_t i = index.size(); i-- > 0;) {  // the next run, as an odometer counts
      const Dim& dim = piece.outer[i];
      data += dim.stride;
      if (++index[i] < dim.size) break;
      data -= static_cast<std::ptrdiff_t>(dim.size) * dim.stride;
      index[i] = 0;
    }
  }
}

template <class Copy>
void Memory::walk(std::size_t at, std::size_t size, Copy&& copy) const noexcept {
  for (std::size_t i = find(at); size > 0; ++i) {
    const Piece& piece = pieces_[i];
    const std::size_t skipped = at - piece.begin;
    const std::size_t part = std::min(size, piece.size - skipped);
    if (piece.outer.empty()) {
      copy(piece.data + skipped, part);
    } else {
      walk_strided(piece, skipped, part, copy);
    }
    at += part;
    size -= part;
  }
}

void Memory::gather(std::size_t at, std::size_t size, std::byte* into) const noexcept {
  walk(at, size, [&into](const std::byte* data, std::size_t part) {
    std::memcpy(into, data, part);
    into += part;
  });
}

void Memory::scatter(std::size_t at, std::size_t size, const std::byte* from) const noexcept {
  walk(at, size, [&from](std::byte* data, std::size_t part) {
    std::memcpy(data, from, part);
    from += part;
  });
}

}  // namespace cudafuture::storage
