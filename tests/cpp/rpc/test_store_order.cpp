// The order of operations at a store service: of one client, and of all clients on one key.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "clock.h"
#include "store/service/order.h"

using rpc_ext::now;
using rpc_ext::store::KeyEntry;
using rpc_ext::store::KeyQueues;
using rpc_ext::store::Problem;
using rpc_ext::store::RequestOrder;

namespace {

constexpr std::uint64_t operations = 4000;
constexpr unsigned workers = 4;

using Numbers = std::vector<std::uint64_t>;

void never() { FAIL("the operation has its turn already"); }

std::shared_ptr<RequestOrder> order_of(double sent) {
  return std::make_shared<RequestOrder>(sent, std::make_shared<std::atomic<std::uint64_t>>(0));
}

// Returns the seconds that the error of a late operation names.
double seconds_late(RequestOrder& order, double expires) {
  const std::string begin = "the request has reached the store service ";
  const std::optional<Problem> problem = order.late(expires);
  REQUIRE(problem);
  REQUIRE(problem->message.starts_with(begin));
  return std::stod(problem->message.substr(begin.size()));
}

KeyEntry entry_at(std::uint64_t sequence, std::uint64_t after, double expires) {
  KeyEntry entry;
  entry.sequence = sequence;
  entry.after = after;
  entry.expires = expires;
  entry.key = "a";
  return entry;
}

template <class Function>
void in_threads(Function function) {
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < workers; ++i) threads.emplace_back(function, i);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST_SUITE_BEGIN("store order");

// ---- one client

TEST_CASE("a read has its turn before the change behind it") {
  const auto order = order_of(now());
  KeyQueues queues;
  const KeyEntry read = entry_at(1, 0, 0), change = entry_at(2, 1, 0), last = entry_at(3, 2, 0);
  Numbers begun;
  order->enqueue(last, queues, false, [&](const auto&) { begun.push_back(3); });
  order->enqueue(change, queues, true, [&](const auto&) {
    begun.push_back(2);
    queues.leave("a");
  });
  CHECK(begun.empty());
  order->enqueue(read, queues, false, [&](const auto&) { begun.push_back(1); });
  CHECK(begun == Numbers{1, 2, 3});
}

TEST_CASE("a change that is late or superseded leaves the queue to the others") {
  const auto order = order_of(now());
  KeyQueues queues;
  const KeyEntry late = entry_at(1, 0, now() - 50), in_time = entry_at(3, 0, now() + 50);
  std::string problem = "it has not ended";
  const auto note = [&](const std::optional<Problem>& found) { problem = found ? found->message : ""; };
  REQUIRE(queues.enter("a", true, never));
  order->enqueue(late, queues, true, note);
  bool has_turn = false;
  order->enqueue(in_time, queues, true, [&](const auto& found) { has_turn = !found; });
  CHECK(problem == "it has not ended");
  queues.leave("a");
  CHECK(problem.find("after its deadline") != std::string::npos);
  CHECK(has_turn);
  const KeyEntry superseded = entry_at(2, 0, now() + 50);
  order->enqueue(superseded, queues, true, note);
  CHECK(problem == "the request to change key 'a' has reached the store service after a later one");
  CHECK_FALSE(queues.enter("a", true, [] {}));  // the other change has its turn still
}

TEST_CASE("a later change supersedes an earlier one") {
  const auto late = std::make_shared<std::atomic<std::uint64_t>>(0);
  RequestOrder order(now(), late);
  const double until = now() + 60;
  CHECK(order.note_change("a", 2, until));
  CHECK_FALSE(order.note_change("a", 1, until));
  CHECK(*late == 1);
  CHECK(order.note_change("b", 1, until));
}

TEST_CASE("deadlines ignore clock differences") {
  const double clients = now() + 5e6;    // its clock is ahead
  auto order = order_of(clients - 100);  // the request to begin took 100 s
  CHECK_FALSE(order->late(clients - 50));
  order->note_arrival(clients, 0);  // a faster one tells the difference of the clocks better
  CHECK(seconds_late(*order, clients - 50) == doctest::Approx(50).epsilon(0.2));
  CHECK_FALSE(order->late(clients + 50));
  order->note_arrival(clients - 100, 0);  // a slower one does not
  CHECK(seconds_late(*order, clients - 50) == doctest::Approx(50).epsilon(0.2));
  CHECK_FALSE(order->late(0));  // no deadline
  CHECK(order->left(0) == std::numeric_limits<double>::infinity());
  CHECK(order->left(clients + 50) == doctest::Approx(50).epsilon(0.2));
}

TEST_CASE("an operation waits for its predecessor") {
  const auto order = order_of(now());
  Numbers begun;
  const auto begin = [&](std::uint64_t number) {
    return [&, number] {
      begun.push_back(number);
      order->pass_on("a", number);
    };
  };
  for (const std::uint64_t i : {5, 3, 2}) CHECK_FALSE(order->arrive("a", i - 1, begin(i)));
  CHECK(order->arrive("b", 0, never));
  CHECK(order->arrive("a", 0, never));
  order->pass_on("a", 1);
  CHECK(begun == Numbers{2, 3});
  CHECK(order->arrive("a", 3, never));
  order->pass_on("a", 4);
  CHECK(begun == Numbers{2, 3, 5});
}

TEST_CASE("reordered operations on many keys begin in order") {
  std::mt19937 random(1);
  struct Operation {
    std::uint64_t number, after;
    std::string key;
  };
  for (int round = 0; round < 200; ++round) {
    const auto order = order_of(now());
    std::map<std::string, std::uint64_t> last;
    std::map<std::string, Numbers> sent, begun;
    std::vector<Operation> operations;
    for (std::uint64_t number = 1; number < 40; ++number) {
      const std::string key(1, static_cast<char>('a' + random() % 3));
      operations.push_back({number, std::exchange(last[key], number), key});
      sent[key].push_back(number);
    }
    std::shuffle(operations.begin(), operations.end(), random);
    for (const Operation& operation : operations) {
      const auto begin = [&, operation] {
        begun[operation.key].push_back(operation.number);
        order->pass_on(operation.key, operation.number);
      };
      if (order->arrive(operation.key, operation.after, begin)) begin();
    }
    CHECK(begun == sent);
  }
}

TEST_CASE("a predecessor that is done delays no operation") {
  const auto order = order_of(now());
  order->note_arrival(now(), 5);
  CHECK(order->arrive("a", 4, never));
}

TEST_CASE("the end of a session begins the operations that wait") {
  const auto order = order_of(now());
  Numbers begun;
  for (const std::uint64_t i : {7, 3}) CHECK_FALSE(order->arrive("a", i, [&begun, i] { begun.push_back(i); }));
  order->end();
  CHECK(begun == Numbers{3, 7});
  CHECK(order->arrive("a", 9, never));  // a request that was on its way to the session
}

TEST_CASE("old operations are forgotten") {
  for (const double expires : {now() - 60, 0.0}) {
    const auto order = order_of(now());
    for (std::uint64_t i = 1; i < 10'000; ++i) {
      const std::string key = std::to_string(i);
      order->note_arrival(now(), i);
      order->note_change(key, i, expires);
      order->pass_on(key, i);
    }
    CHECK(order->remembered() < 5000);
  }
}

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

// ---- one key

TEST_CASE("changes of a key run one by one, and the reads between them together") {
  KeyQueues queues;
  Numbers begun;
  const auto enter = [&](const std::string& key, bool is_change, std::uint64_t number = 99) {
    return queues.enter(key, is_change, [&begun, number] { begun.push_back(number); });
  };
  CHECK(enter("a", true));
  CHECK(enter("b", true));
  std::uint64_t number = 0;
  for (const bool is_change : {false, false, true, false, true}) CHECK_FALSE(enter("a", is_change, number++));
  queues.leave("b");
  CHECK(begun.empty());
  queues.leave("a");
  CHECK(begun == Numbers{0, 1, 2});
  queues.leave("a");
  CHECK(begun == Numbers{0, 1, 2, 3, 4});
  queues.leave("a");
  CHECK(enter("a", false));
  CHECK(enter("a", false));
  CHECK(enter("a", true));
}

TEST_CASE("a change waits for earlier reads") {
  KeyQueues queues;
  std::vector<std::string> turns;
  CHECK(queues.enter("a", true, never));
  CHECK_FALSE(queues.enter("a", false, [&] {
    CHECK_FALSE(queues.enter("a", true, [&] { turns.emplace_back("change"); }));
    turns.emplace_back("read");
  }));
  queues.leave("a");
  CHECK(turns == std::vector<std::string>{"read", "change"});
}

TEST_CASE("long chains of operations use no stack") {
  const auto order = order_of(now());
  KeyQueues queues;
  std::uint64_t begun = 0;
  const auto begin = [&](std::uint64_t number) {
    const auto change = [&] {
      ++begun;
      queues.leave("a");
    };
    if (queues.enter("a", true, change)) change();
    order->pass_on("a", number);
  };
  constexpr std::uint64_t count = 100'000;
  for (std::uint64_t i = count; i > 1; --i) CHECK_FALSE(order->arrive("a", i - 1, [&begin, i] { begin(i); }));
  begin(1);
  CHECK(begun == count);
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
