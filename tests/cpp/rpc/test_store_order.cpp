// The order of operations at a store service, with many concurrent threads.
#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "store/service/order.h"

using rpc_ext::store::KeyQueues;
using rpc_ext::store::RequestOrder;

namespace {

constexpr std::uint64_t operations = 4000;
constexpr unsigned workers = 4;

template <class Function>
void in_threads(Function function) {
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < workers; ++i) threads.emplace_back(function, i);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST_SUITE_BEGIN("store order");

TEST_CASE("operations begin in sequence order for any order of arrival") {
  RequestOrder order(0, std::make_shared<std::atomic<std::uint64_t>>(0));
  std::vector<std::uint64_t> begun;  // RequestOrder begins one operation at a time
  const auto begin = [&](std::uint64_t number) {
    begun.push_back(number);
    order.pass_on("key", number);
  };
  in_threads([&](unsigned worker) {
    for (std::uint64_t i = operations - worker; i > 0; i = i > workers ? i - workers : 0) {
      if (order.arrive("key", i - 1, [&begin, i] { begin(i); })) begin(i);
    }
  });
  REQUIRE(begun.size() == operations);
  for (std::uint64_t i = 0; i < operations; ++i) CHECK(begun[i] == i + 1);
}

TEST_CASE("deadlines of a client hold after its clock stood still") {
  rpc_ext::store::ClockOffset offset;  // of a client whose clock is 100 s behind
  for (double at = 0; at < 60; ++at) offset.add(at, at - 100);
  CHECK(offset.seconds() == 100);
  for (double held = 60; held < 90; ++held) offset.add(90, held - 100);  // all arrive together
  CHECK(offset.seconds() == 100);
  double waited = 0;  // the client's clock has stood still for 1000 s
  for (; offset.seconds() != 1100; ++waited) offset.add(1090 + waited, waited - 10);
  CHECK(waited <= 2 * rpc_ext::store::ClockOffset::window + 1);
  for (double at = 2000; at < 1e6; at += 60) offset.add(at, at * (1 - 50e-6));  // its clock is slow
  CHECK(offset.seconds() == doctest::Approx(50).epsilon(0.01));
}

TEST_CASE("changes of a key run singly, and queued reads between them") {
  KeyQueues queues;
  std::atomic<int> changing{0};
  std::atomic<std::uint64_t> ended{0}, overlaps{0};
  const auto change = [&] {
    if (changing.fetch_add(1) != 0) ++overlaps;
    std::this_thread::yield();
    changing.fetch_sub(1);
    ++ended;
    queues.leave("key");
  };
  const auto read = [&] {
    if (changing != 0) ++overlaps;
    ++ended;
  };
  in_threads([&](unsigned worker) {
    for (std::uint64_t i = 0; i < operations / workers; ++i) {
      if ((i + worker) % 2 == 0) {
        if (queues.enter("key", true, change)) change();
      } else {
        queues.enter("key", false, read);  // a read that may run at once may overlap a later change
      }
    }
  });
  CHECK(overlaps == 0);
  CHECK(queues.enter("key", true, [] {}));  // the last change has left
}

TEST_SUITE_END();
