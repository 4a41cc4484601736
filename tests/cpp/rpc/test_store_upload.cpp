// Large tensors that a client of a store service writes in parts, over a store in memory.
#include <doctest/doctest.h>

#include <ATen/ops/full.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "clock.h"
#include "core.h"
#include "store/service/upload.h"

namespace api = cudafuture::api;
using api::Problem;
using rpc_ext::store::KeyEntry;
using rpc_ext::store::kPart;
using rpc_ext::store::Namespace;
using rpc_ext::store::RequestOrder;
using rpc_ext::store::UploadList;
using rpc_ext::store::Uploads;

namespace {

constexpr std::uint64_t kUploadBytes = kPart + 64;
constexpr std::uint64_t kWrongDigest = 99;

[[noreturn]] void raise(Problem::Kind kind, const std::string& message) {
  throw api::Failure({.kind = kind, .message = message});
}

// A store in memory. It completes operations at once, or in release().
class MemoryStore final : public api::Store, public std::enable_shared_from_this<MemoryStore> {
 public:
  bool is_held = false;                          // operations wait for release()
  std::function<void()> on_begin = [] {};        // runs in begin_write(), and may throw
  std::function<void()> on_call = [] {};         // runs in put() and commit() of a write, and may throw
  std::optional<Problem> commit_problem;         // of each commit; none: it succeeds
  std::atomic<int> reserved{0};                  // multipart writes that have room in the store
  std::map<std::string, std::uint64_t> tensors;  // their sizes in bytes

  void end(api::Done done, std::optional<Problem> problem) {
    if (is_held) {
      held_.emplace_back(std::move(done), std::move(problem));
    } else {
      done(problem ? &*problem : nullptr);
    }
  }
  void release() {
    is_held = false;
    for (auto& [done, problem] : std::exchange(held_, {})) done(problem ? &*problem : nullptr);
  }
  void install(const std::string& key, std::uint64_t nbytes) {
    const std::lock_guard lock(mutex_);
    tensors[key] = nbytes;
  }

  bool is_closed() const noexcept override { return false; }
  std::optional<api::FoundTensor> find(const std::string&) override { return std::nullopt; }
  void read(const std::vector<api::PartRead>&, api::Done) override { FAIL("no test reads"); }
  void write(const api::TensorWrite&, api::Done) override { FAIL("no test writes a whole tensor"); }
  void erase(const std::vector<std::string>&, api::Done) override { FAIL("no test deletes"); }
  std::shared_ptr<api::MultipartWrite> begin_write(const std::string& key, c10::ScalarType,
                                                   const std::vector<std::int64_t>& sizes) override;

 private:
  std::mutex mutex_;
  std::vector<std::pair<api::Done, std::optional<Problem>>> held_;
};

// Lock: mutex_ guards all fields; nothing is taken under it.
class MemoryWrite final : public api::MultipartWrite {
 public:
  MemoryWrite(std::shared_ptr<MemoryStore> store, std::string key, std::uint64_t nbytes)
      : store_(std::move(store)), key_(std::move(key)), nbytes_(nbytes) {
    ++store_->reserved;
  }
  ~MemoryWrite() override { abort(); }

  void put(std::uint64_t at, const std::byte* from, std::size_t size, std::uint64_t digest, api::Done done) override {
    store_->on_call();
    {
      const std::lock_guard lock(mutex_);
      if (!is_open_) raise(Problem::Kind::invalid_state, "the multipart write is over");
      if (!parts_.emplace(at, size).second) raise(Problem::Kind::value, "an earlier part");
    }
    CHECK(static_cast<unsigned>(*from) == at / kPart);  // the bytes of this part
    std::optional<Problem> problem;
    if (digest == kWrongDigest) problem = Problem{.kind = Problem::Kind::checksum, .message = "other bytes"};
    store_->end(std::move(done), std::move(problem));
  }
  void commit(api::Done done) override {
    store_->on_call();
    {
      const std::lock_guard lock(mutex_);
      if (!is_open_) raise(Problem::Kind::invalid_state, "the multipart write is over");
      is_open_ = false;
      std::uint64_t written = 0;
      for (const auto& [at, size] : parts_) written += size;
      CHECK(written == nbytes_);
    }
    if (!store_->commit_problem) store_->install(key_, nbytes_);
    --store_->reserved;
    store_->end(std::move(done), store_->commit_problem);
  }
  void abort() noexcept override {
    const std::lock_guard lock(mutex_);
    if (is_open_) --store_->reserved;
    is_open_ = false;
  }

 private:
  const std::shared_ptr<MemoryStore> store_;
  const std::string key_;
  const std::uint64_t nbytes_;
  std::mutex mutex_;
  bool is_open_ = true;
  std::map<std::uint64_t, std::size_t> parts_;
};

std::shared_ptr<api::MultipartWrite> MemoryStore::begin_write(const std::string& key, c10::ScalarType,
                                                              const std::vector<std::int64_t>& sizes) {
  on_begin();
  return std::make_shared<MemoryWrite>(shared_from_this(), key, static_cast<std::uint64_t>(sizes.at(0)));
}

// The end of a part.
struct PartEnd {
  std::atomic<int> calls{0};
  Problem::Kind kind{};
  std::string message;  // empty: the part was written
  bool is_refused = false;

  bool has_succeeded() const { return calls == 1 && message.empty(); }
  bool has_failed(Problem::Kind as, const std::string& with) const {
    return calls == 1 && kind == as && message.find(with) != std::string::npos;
  }
};
using PartEndPtr = std::shared_ptr<PartEnd>;

// The uploads of one client.
struct UploadingClient {
  explicit UploadingClient(std::optional<std::uint64_t> capacity = std::nullopt)
      : space(std::make_shared<Namespace>(store, "k0123456789abcdef/", capacity, Sizes{})) {}
  ~UploadingClient() { uploads->end(); }  // unfinished uploads keep themselves alive
  UploadingClient(const UploadingClient&) = delete;
  UploadingClient& operator=(const UploadingClient&) = delete;

  using Sizes = std::vector<std::pair<std::string, std::uint64_t>>;
  const std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();
  const std::shared_ptr<std::atomic<std::uint64_t>> late = std::make_shared<std::atomic<std::uint64_t>>(0);
  const std::shared_ptr<RequestOrder> order = std::make_shared<RequestOrder>(rpc_ext::now(), late);
  const std::shared_ptr<Namespace> space;
  const std::shared_ptr<Uploads> uploads = std::make_shared<Uploads>(space, order);

  static KeyEntry part_of(std::uint32_t part, std::uint64_t sequence = 1) {
    KeyEntry entry;
    entry.sequence = sequence;
    entry.key = "x";
    entry.sizes = {static_cast<std::int64_t>(kUploadBytes)};
    entry.nbytes = kUploadBytes;
    entry.part = part;
    entry.length = static_cast<std::uint32_t>(part == 0 ? kPart : kUploadBytes - kPart);
    return entry;
  }
  PartEndPtr put(const KeyEntry& entry) const {
    const auto end = std::make_shared<PartEnd>();
    at::Tensor data = at::full({entry.length}, entry.part, at::kByte);
    const c10::weak_intrusive_ptr<c10::TensorImpl> held(data.getIntrusivePtr());
    uploads->put(entry, std::move(data), [end, held](const Problem* problem, bool is_refused) {
      CHECK(held.expired());  // the memory is free before the client learns of it
      if (problem != nullptr) {
        end->kind = problem->kind;
        end->message = problem->message;
      }
      end->is_refused = is_refused;
      ++end->calls;
    });
    return end;
  }
  PartEndPtr put(std::uint32_t part, std::uint64_t sequence = 1) const { return put(part_of(part, sequence)); }
  void abandon(std::uint64_t sequence = 1) const {
    uploads->fail(sequence, {.kind = Problem::Kind::timeout, .message = "the client gave it up"});
  }
  // Requires that the upload has left nothing, and that no operation waits for it.
  void expect_nothing_left() const {
    CHECK(space->is_empty());
    CHECK(store->reserved == 0);
    CHECK(store->tensors.empty());
    CHECK(order->arrive("x", 1, [] {}));
    bool has_turn = space->queues.enter("x", true, [] {});
    CHECK(has_turn);
    space->queues.leave("x");
  }
};

}  // namespace

TEST_SUITE_BEGIN("store upload");

TEST_CASE("the last part ends after the tensor was committed") {
  UploadingClient client;
  CHECK(client.put(1)->has_succeeded());
  CHECK(client.space->keys().empty());
  CHECK_FALSE(client.space->is_empty());
  client.store->is_held = true;
  const PartEndPtr last = client.put(0);
  client.store->is_held = false;
  CHECK(last->calls == 0);
  client.store->release();
  CHECK(last->has_succeeded());
  CHECK(client.space->keys() == std::vector<std::string>{"x"});
  CHECK(client.store->tensors.at("k0123456789abcdef/x") == kUploadBytes);
}

TEST_CASE("an aborted upload fails all parts") {
  UploadingClient client(kUploadBytes);
  client.store->is_held = true;
  const PartEndPtr ends[] = {client.put(0), client.put(1)};
  client.abandon();
  client.store->release();
  for (const PartEndPtr& end : ends) CHECK(end->has_failed(Problem::Kind::timeout, "gave it up"));
  CHECK(client.put(1)->has_failed(Problem::Kind::timeout, "gave it up"));
  client.expect_nothing_left();
}

TEST_CASE("an upload without quota or room leaves nothing and delays no operation") {
  UploadingClient small(kUploadBytes - 1);
  CHECK(small.put(0)->has_failed(Problem::Kind::quota, "no room for 16777280 bytes in the namespace"));
  CHECK(small.put(1)->has_failed(Problem::Kind::quota, "no room"));
  small.expect_nothing_left();

  UploadingClient full;
  full.store->on_begin = [] { raise(Problem::Kind::storage, "no space left"); };
  CHECK(full.put(0)->has_failed(Problem::Kind::storage, "no space left"));
  CHECK(full.put(1)->has_failed(Problem::Kind::storage, "no space left"));
  full.expect_nothing_left();
}

TEST_CASE("an upload whose store throws any exception fails and leaves nothing") {
  const auto throw_memory = [] { throw std::bad_alloc(); };
  const auto throw_other = [] { throw std::runtime_error("the store is broken"); };
  for (const bool is_memory : {true, false}) {
    const auto has_failed = [&](const PartEndPtr& end) {
      return is_memory ? end->has_failed(Problem::Kind::memory, "") : end->has_failed(Problem::Kind::other, "broken");
    };
    const std::function<void()> throws = is_memory ? std::function<void()>(throw_memory) : throw_other;
    UploadingClient at_begin(kUploadBytes), at_part(kUploadBytes), at_commit(kUploadBytes);
    at_begin.store->on_begin = throws;
    CHECK(has_failed(at_begin.put(0)));
    at_begin.expect_nothing_left();

    at_part.store->on_call = throws;
    CHECK(has_failed(at_part.put(0)));
    at_part.abandon();
    at_part.expect_nothing_left();

    CHECK(at_commit.put(0)->has_succeeded());
    at_commit.store->on_call = [&, calls = 0]() mutable {
      if (++calls == 2) throws();  // the first call puts the part
    };
    CHECK(has_failed(at_commit.put(1)));
    at_commit.store->on_call = [] {};
    CHECK(has_failed(at_commit.put(1)));
    at_commit.expect_nothing_left();
  }
}

TEST_CASE("an upload commits after the earlier operation on its key") {
  UploadingClient client;
  KeyEntry first = client.part_of(0, 2), second = client.part_of(1, 2);
  first.after = second.after = 1;
  CHECK(client.put(first)->has_succeeded());
  const PartEndPtr last = client.put(second);
  CHECK(last->calls == 0);
  CHECK(client.space->keys().empty());
  client.order->pass_on("x", 1);
  CHECK(last->has_succeeded());
  CHECK(client.space->keys().size() == 1);
}

TEST_CASE("an upload takes its turn among the changes of its key") {
  UploadingClient client;
  REQUIRE(client.space->queues.enter("x", true, [] {}));
  client.put(0);
  const PartEndPtr last = client.put(1);
  bool has_read = false;
  CHECK_FALSE(client.space->queues.enter("x", false, [&] { has_read = !client.space->keys().empty(); }));
  CHECK(last->calls == 0);
  client.space->queues.leave("x");
  CHECK(last->has_succeeded());
  CHECK(has_read);  // after the commit
}

TEST_CASE("an upload that is abandoned before or at its turn lets the next operation begin") {
  for (const bool has_turn : {false, true}) {
    UploadingClient client;
    if (!has_turn) REQUIRE(client.space->queues.enter("x", true, [] {}));
    client.put(0);
    bool has_begun = false;
    CHECK_FALSE(client.space->queues.enter("x", true, [&] { has_begun = true; }));
    client.abandon();
    CHECK(has_begun == has_turn);
    if (!has_turn) client.space->queues.leave("x");
    CHECK(has_begun);
    client.space->queues.leave("x");
    client.expect_nothing_left();
  }
}

TEST_CASE("an abandoned upload with all of its parts does not commit at its turn") {
  UploadingClient client;
  REQUIRE(client.space->queues.enter("x", true, [] {}));
  client.put(0);
  const PartEndPtr last = client.put(1);
  client.abandon();
  CHECK(last->has_failed(Problem::Kind::timeout, "gave it up"));
  client.space->queues.leave("x");
  client.expect_nothing_left();
}

TEST_CASE("an upload after a later change of its key fails") {
  UploadingClient client;
  const double expires = rpc_ext::now() + 60;
  REQUIRE(client.order->note_change("x", 2, expires));
  CHECK(client.put(0)->has_failed(Problem::Kind::timeout, "after a later one"));
  CHECK(client.put(1)->has_failed(Problem::Kind::timeout, "after a later one"));
  CHECK(*client.late == 1);
  client.expect_nothing_left();
}

TEST_CASE("duplicate and mismatching parts are refused, and the upload continues") {
  UploadingClient client;
  CHECK(client.put(0)->has_succeeded());
  KeyEntry other_key = client.part_of(1), other_shape = client.part_of(1), other_dtype = client.part_of(1);
  other_key.key = "y";
  other_shape.sizes = {1, static_cast<std::int64_t>(kUploadBytes)};
  other_dtype.dtype = c10::ScalarType::Char;
  for (const KeyEntry& entry : {other_key, other_shape, other_dtype}) {
    const PartEndPtr end = client.put(entry);
    CHECK(end->has_failed(Problem::Kind::value, "other parts of that tensor are of key 'x'"));
    CHECK(end->is_refused);
  }
  const PartEndPtr duplicate = client.put(0);
  CHECK(duplicate->has_failed(Problem::Kind::value, "earlier part"));
  CHECK(duplicate->is_refused);
  CHECK(client.put(1)->has_succeeded());
  CHECK(client.space->keys().size() == 1);
}

TEST_CASE("a part with other bytes than were sent fails the upload") {
  UploadingClient client;
  client.store->is_held = true;
  const PartEndPtr other = client.put(1);
  KeyEntry spoiled = client.part_of(0);
  spoiled.digest = kWrongDigest;
  client.store->is_held = false;
  const PartEndPtr end = client.put(spoiled);
  client.store->release();
  const std::string message = "key 'x': the 16777216 bytes received are not those that were sent";
  CHECK(end->has_failed(Problem::Kind::checksum, message));
  CHECK(end->is_refused);
  CHECK(other->has_failed(Problem::Kind::checksum, message));
  CHECK_FALSE(other->is_refused);
  CHECK(client.put(1)->has_failed(Problem::Kind::checksum, message));
  client.expect_nothing_left();
}

TEST_CASE("a failed commit fails the last part and gives the quota back") {
  UploadingClient client(kUploadBytes);
  client.store->commit_problem = Problem{.kind = Problem::Kind::storage, .message = "the disk is broken"};
  CHECK(client.put(0)->has_succeeded());
  CHECK(client.put(1)->has_failed(Problem::Kind::storage, "the disk is broken"));
  CHECK(client.put(1)->has_failed(Problem::Kind::storage, "the disk is broken"));
  client.expect_nothing_left();
}

TEST_CASE("an upload that replaces a tensor releases the quota of the old one") {
  UploadingClient client(2 * kUploadBytes);
  for (std::uint64_t sequence = 1; sequence <= 5; ++sequence) {
    CHECK(client.put(0, sequence)->has_succeeded());
    CHECK(client.put(1, sequence)->has_succeeded());
  }
}

TEST_CASE("an upload that is not complete before its deadline fails") {
  UploadingClient client;
  KeyEntry entry = client.part_of(0);
  entry.expires = rpc_ext::now() + 60;
  CHECK(client.put(entry)->has_succeeded());
  client.put(0, 2);  // it has no deadline
  UploadList expired;
  CHECK(client.uploads->find_expired(expired) == doctest::Approx(60).epsilon(0.5));
  CHECK(expired.empty());
  client.order->note_arrival(rpc_ext::now() + 120, 0);  // the client's clock is ahead
  client.uploads->find_expired(expired);
  REQUIRE(expired.size() == 1);
  expired.front()->expire();
  CHECK(client.put(1)->has_failed(Problem::Kind::timeout, "the write of key 'x' was not complete before its deadline"));
  client.abandon(2);
  client.expect_nothing_left();
}

TEST_CASE("a late upload neither begins nor commits") {
  UploadingClient client;
  KeyEntry late = client.part_of(0);
  late.expires = rpc_ext::now() - 60;
  elsewhere.is_held = true;  // it needs no thread, for which it could expire before it begins
  CHECK(client.put(late)->has_failed(Problem::Kind::timeout, "after its deadline"));
  elsewhere.is_held = false;
  CHECK(client.put(1)->has_failed(Problem::Kind::timeout, "after its deadline"));
  CHECK(*client.late == 1);

  REQUIRE(client.space->queues.enter("x", true, [] {}));
  KeyEntry parts[] = {client.part_of(0, 2), client.part_of(1, 2)};
  for (KeyEntry& part : parts) part.expires = rpc_ext::now() + 60;
  client.put(parts[0]);
  const PartEndPtr last = client.put(parts[1]);
  client.order->note_arrival(rpc_ext::now() + 120, 0);
  client.space->queues.leave("x");
  CHECK(last->has_failed(Problem::Kind::timeout, "after its deadline"));
  CHECK(client.put(1, 2)->has_failed(Problem::Kind::timeout, "after its deadline"));
  CHECK(*client.late == 2);
  client.expect_nothing_left();
}

TEST_CASE("the end of a session aborts its uploads") {
  UploadingClient client;
  CHECK(client.put(0)->has_succeeded());
  client.uploads->end();
  for (const std::uint64_t sequence : {1, 2}) {
    CHECK(client.put(1, sequence)->has_failed(Problem::Kind::invalid_state, "the session has ended"));
  }
  client.expect_nothing_left();
}

TEST_CASE("parts that arrive while the write begins are written then") {
  UploadingClient client;
  PartEndPtr during;
  client.store->on_begin = [&] { during = client.put(1); };
  const PartEndPtr first = client.put(0);
  CHECK(first->calls + during->calls == 2);
  CHECK(first->has_succeeded());
  CHECK(during->has_succeeded());
  CHECK(client.space->keys().size() == 1);
}

TEST_CASE("the write of the store begins on another thread") {
  for (const bool is_abandoned : {false, true}) {
    UploadingClient client;
    int begun = 0;
    client.store->on_begin = [&] { ++begun; };
    elsewhere.is_held = true;
    const PartEndPtr ends[] = {client.put(0), client.put(1)};
    CHECK(begun == 0);
    if (is_abandoned) client.abandon();
    elsewhere.release();
    elsewhere.is_held = false;
    CHECK(begun == 1);
    for (const PartEndPtr& end : ends) {
      CHECK((is_abandoned ? end->has_failed(Problem::Kind::timeout, "gave it up") : end->has_succeeded()));
    }
    if (is_abandoned) client.expect_nothing_left();
  }
}

TEST_CASE("an upload without a thread to begin on fails, and delays no operation") {
  UploadingClient client;
  elsewhere.throws = true;
  CHECK(client.put(0)->has_failed(Problem::Kind::memory, ""));
  elsewhere.throws = false;
  CHECK(client.put(1)->has_failed(Problem::Kind::memory, ""));
  client.expect_nothing_left();
}

TEST_CASE("an upload that is aborted while its write begins leaves nothing") {
  for (const bool has_room : {true, false}) {
    UploadingClient client;
    PartEndPtr during;
    client.store->on_begin = [&] {
      during = client.put(1);
      client.abandon();
      if (!has_room) raise(Problem::Kind::storage, "no space left");
    };
    CHECK(client.put(0)->has_failed(Problem::Kind::timeout, "gave it up"));
    CHECK(during->has_failed(Problem::Kind::timeout, "gave it up"));
    client.expect_nothing_left();
  }
}

TEST_CASE("the error of a part names the key of the client") {
  for (const char end : {'/', '~'}) {
    const std::string name = std::string("k0123456789abcdef") + end + "key";
    const Problem problem{.kind = Problem::Kind::invalid_state,
                          .message = "the multipart write of key '" + name + "' was aborted"};
    CHECK(rpc_ext::store::for_client("key", problem, 1).message == "the multipart write of key 'key' was aborted");
  }
  const Problem full{.kind = Problem::Kind::quota, .message = "no room for 20480 bytes in one piece: 8192 are free"};
  const Problem told = rpc_ext::store::for_client("key", full, 17000);
  CHECK(told.message == "no room for 17000 bytes: 8192 are free");
  CHECK(told.wanted == 17000);
}

TEST_CASE("the last failures are remembered") {
  UploadingClient client;
  constexpr std::uint64_t remembered = 4096;
  for (std::uint64_t sequence = 1; sequence <= remembered + 1; ++sequence) client.abandon(sequence);
  CHECK(client.put(0, 1)->has_succeeded());  // it was forgotten
  CHECK(client.put(0, 2)->has_failed(Problem::Kind::timeout, "gave it up"));
  CHECK(client.put(0, remembered + 1)->has_failed(Problem::Kind::timeout, "gave it up"));
}

TEST_CASE("each part ends once, whatever threads put parts and abandon their upload") {
  UploadingClient client;
  constexpr std::uint64_t uploads = 50;
  std::vector<PartEndPtr> ends(3 * uploads);
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      for (std::uint64_t sequence = 1; sequence <= uploads; ++sequence) {
        ends[3 * (sequence - 1) + i] = client.put(i % 2, sequence);
        if (i == 2 && sequence % 2 == 0) client.abandon(sequence);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::uint64_t sequence = 1; sequence <= uploads; ++sequence) client.abandon(sequence);
  for (const PartEndPtr& end : ends) CHECK(end->calls == 1);
  CHECK(client.store->reserved == 0);
  CHECK(client.space->keys().size() == client.store->tensors.size());
}

TEST_SUITE_END();
