// Memory that is used again: by whom, how much of it is kept, and that a part keeps the whole.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>

#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "pieces.h"

using rpc_ext::alone;
using rpc_ext::Pieces;

namespace {

constexpr std::int64_t kSize = 1 << 20;

std::uintptr_t place(const at::Tensor& tensor) { return reinterpret_cast<std::uintptr_t>(tensor.data_ptr()); }

}  // namespace

TEST_CASE("a block is used again when nobody has it any more") {
  auto pieces = std::make_shared<Pieces>(kSize, 2);
  at::Tensor first = pieces->take(kSize);
  CHECK(first.numel() == kSize);
  CHECK(first.storage().nbytes() == kSize);
  CHECK(place(first) % (1 << 21) == 0);
  const at::Tensor view = first.slice(0, 5, 10);
  const std::uintptr_t where = place(first);
  first.reset();
  CHECK(pieces->kept() == 0);
  CHECK(place(pieces->take(kSize)) != where);
  const_cast<at::Tensor&>(view).reset();
  CHECK(pieces->kept() == 2);
  const at::Tensor shorter = pieces->take(kSize - 100);
  CHECK(place(shorter) == where);
  CHECK(shorter.storage().nbytes() == kSize - 100);
}

TEST_CASE("no more blocks are kept than there may be, and those in use outlive the rest") {
  auto pieces = std::make_shared<Pieces>(kSize, 2);
  std::vector<at::Tensor> taken;
  for (int i = 0; i < 5; ++i) taken.push_back(pieces->take(kSize).fill_(i));
  const at::Tensor last = taken.back();
  taken.clear();
  CHECK(pieces->kept() == 2);
  pieces.reset();
  CHECK(last[kSize - 1].item<int>() == 4);
}

TEST_CASE("what is small or large is memory like any other") {
  auto pieces = std::make_shared<Pieces>(kSize, 2);
  for (const std::int64_t nbytes : {std::int64_t{0}, std::int64_t{100}, kSize + 1}) {
    CHECK(pieces->take(nbytes).numel() == nbytes);
    CHECK(pieces->kept() == 0);
  }
  CHECK_THROWS_AS(pieces->take(-1), std::invalid_argument);
}

TEST_CASE("blocks may be given back by any thread") {
  auto pieces = std::make_shared<Pieces>(kSize, 4);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&pieces, i] {
      for (int turn = 0; turn < 50; ++turn) {
        at::Tensor mine = pieces->take(kSize);
        mine.data_ptr<std::uint8_t>()[0] = static_cast<std::uint8_t>(i);
        std::thread([other = std::move(mine), i] { CHECK(other.data_ptr<std::uint8_t>()[0] == i); }).join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(pieces->kept() <= 4);
  CHECK(pieces->kept() >= 1);
}

TEST_CASE("a part has a storage of its own, and keeps the whole") {
  std::optional<at::Tensor> whole = at::arange(200, at::kByte);
  const at::Tensor part = alone(*whole, 50, 100);
  CHECK(part.storage().nbytes() == 100);
  CHECK(place(part) == place(*whole) + 50);
  whole.reset();
  CHECK(at::equal(part, at::arange(50, 150, at::kByte)));
  CHECK(alone(part, 100, 0).numel() == 0);
  CHECK_THROWS_AS(alone(part, 1, 100), std::out_of_range);
  CHECK_THROWS_AS(alone(part, -1, 1), std::out_of_range);
  CHECK_THROWS_AS(alone(at::arange(4), 0, 1), std::invalid_argument);
}
