// The wire of remote stores: a part of a tensor has its own storage, and keeps the memory of the whole tensor.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>

#include <cstdint>
#include <optional>
#include <stdexcept>

#include <doctest/doctest.h>

#include "store/wire/message.h"

using rpc_ext::store::alone;

TEST_CASE("a part has its own storage and keeps the whole tensor") {
  std::optional<at::Tensor> whole = at::arange(200, at::kByte);
  const at::Tensor part = alone(*whole, 50, 100);
  CHECK(part.storage().nbytes() == 100);
  CHECK(part.data_ptr() == whole->data_ptr<std::uint8_t>() + 50);
  whole.reset();
  CHECK(at::equal(part, at::arange(50, 150, at::kByte)));
  CHECK(alone(part, 100, 0).numel() == 0);
  CHECK_THROWS_AS(alone(part, 1, 100), std::out_of_range);
  CHECK_THROWS_AS(alone(part, -1, 1), std::out_of_range);
  CHECK_THROWS_AS(alone(at::arange(4), 0, 1), std::invalid_argument);
}
