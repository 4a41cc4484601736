// The session of one client of a store service: its deadlines, and its requests for buffers.
#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "core.h"
#include "store/service/store_session.h"

using rpc_ext::store::FoundTensor;
using rpc_ext::store::KeyEntry;
using rpc_ext::store::Namespace;
using rpc_ext::store::RequestOrder;
using rpc_ext::store::StoreSession;

namespace {

std::shared_ptr<StoreSession> make_session(StoreSession::SetTimer set_timer = [](double, const auto&) {}) {
  const auto late = std::make_shared<std::atomic<std::uint64_t>>(0);
  const std::vector<std::pair<std::string, std::uint64_t>> sizes;
  return std::make_shared<StoreSession>(std::make_shared<Namespace>(nullptr, "k0123456789abcdef/", std::nullopt, sizes),
                                        std::make_shared<RequestOrder>(rpc_ext::now(), late), 1 << 20,
                                        std::move(set_timer));
}

KeyEntry read_of(std::uint64_t sequence, double expires) {
  KeyEntry entry;
  entry.sequence = sequence;
  entry.expires = expires;
  entry.key = "x";
  return entry;
}

}  // namespace

TEST_SUITE_BEGIN("store session");

TEST_CASE("a request for a buffer is forgotten when it has one") {
  const auto session = make_session();
  buffers.are_held = true;
  at::Tensor buffer;
  session->take_buffer(1 << 16, 0, [&](at::Tensor taken) { buffer = std::move(taken); });
  CHECK_FALSE(buffer.defined());
  CHECK_FALSE(buffers.cancel.expired());
  buffers.release();
  buffers.are_held = false;
  CHECK(buffer.nbytes() == 1 << 16);
  CHECK(buffers.cancel.expired());
  session->take_buffer(1 << 16, 0, [&](at::Tensor taken) { buffer = std::move(taken); });
}

TEST_CASE("the deadline after one without a timer asks for a timer") {
  int asked = 0;
  const auto session = make_session([&](double, const auto& failed) {
    if (++asked == 1) failed();
  });
  const double expires = rpc_ext::now() + 60;
  FoundTensor tensor;
  tensor.nbytes = 1;
  session->keep(read_of(1, expires), tensor, false);
  CHECK(asked == 1);
  for (const std::uint64_t sequence : {2, 3}) {
    session->keep(read_of(sequence, expires + static_cast<double>(sequence)), tensor, false);
    CHECK(asked == 2);
  }
  session->end();
}

TEST_SUITE_END();
