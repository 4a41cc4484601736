// The I/O engine under the sanitizers: both backends, with injected faults, cancelled operations, and operations
// that outlive the engine's last reference.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bytes.h"
#include "callback.h"
#include "fake_runtime.h"
#include "folder.h"
#include "io/engine.h"
#include "io/failure.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;
using namespace cudafuture::io;

namespace {

constexpr std::size_t kBlock = 4096;

// Return the backends that work on this system.
std::vector<BackendKind> backends() {
  std::vector<BackendKind> found = {BackendKind::threads};
  try {
    Engine::Options options;
    options.backend = BackendKind::io_uring;
    options.queue_depth = 1;
    Engine::start(options)->close();
    found.push_back(BackendKind::io_uring);
  } catch (const Failure& e) {
    MESSAGE(e.what());
  }
  return found;
}

Engine::Options small(BackendKind backend) {
  Engine::Options options;
  options.backend = backend;
  options.queue_depth = 3;
  options.block_size = 4 * kBlock;
  options.threads = 2;
  return options;
}

// An operation with memory that is freed when the operation is done, so that the sanitizer reports a late access.
struct Transfer {
  std::unique_ptr<Bytes> bytes;
  FuturePtr future = pending();
};

Transfer submit(Engine& engine, const std::shared_ptr<File>& file, Direction direction, std::uint64_t offset,
                Bytes content) {
  Transfer transfer{std::make_unique<Bytes>(std::move(content)), pending()};
  Request request;
  request.direction = direction;
  request.file = file;
  request.offset = offset;
  request.memory.add(transfer.bytes->data(), transfer.bytes->size());
  request.future = transfer.future;
  engine.submit(std::move(request));
  return transfer;
}

void wait_for(const Transfer& transfer) { transfer.future->wait_until(nullptr); }

}  // namespace

TEST_CASE("io: threads read back their writes despite EAGAIN, EINTR and short results") {
  for (const BackendKind backend : backends()) {
    for (const Direct direct : {Direct::automatic, Direct::no}) {
      Engine::Options options = small(backend);
      options.faults = FaultRates{7, 0, 0, 0.1, 0.1, 0.3, 0.3, false};
      const Folder folder;
      const auto engine = Engine::start(options);
      const auto file = File::open(folder.file(), Access::read_write, Start::empty, direct);
      constexpr int kThreads = 4;
      together(kThreads, [&](int number) {
        std::minstd_rand random(static_cast<unsigned>(number));
        const std::uint64_t mine = static_cast<std::uint64_t>(number) * 50'000;
        for (int round = 0; round < 20; ++round) {
          const std::size_t size = 1 + random() % 50'000;
          wait_for(submit(*engine, file, Direction::write, mine, numbered(size, static_cast<unsigned>(round))));
          const Transfer read = submit(*engine, file, Direction::read, mine, Bytes(size));
          wait_for(read);
          CHECK(read.future->state() == State::completed);
          CHECK(*read.bytes == numbered(size, static_cast<unsigned>(round)));
        }
      });
      engine->close();
      engine->join();
      CHECK(engine->statistics().pending == 0);
      CHECK(engine->statistics().again > 0);
    }
  }
}

TEST_CASE("io: a failed block fails only its own operation") {
  for (const BackendKind backend : backends()) {
    Engine::Options options = small(backend);
    options.faults = FaultRates{3, 0.2, 0.2, 0, 0, 0, 0.5, false};
    const Folder folder;
    const auto engine = Engine::start(options);
    const auto file = File::open(folder.file(), Access::read_write, Start::empty, Direct::automatic);
    int failed = 0;
    std::vector<Transfer> writes;
    for (int i = 0; i < 200; ++i)
      writes.push_back(submit(*engine, file, Direction::write, static_cast<std::uint64_t>(i) * 8000,
                              numbered(8000, static_cast<unsigned>(i))));
    for (int i = 0; i < 200; ++i) {
      const Transfer& write = writes[static_cast<std::size_t>(i)];
      wait_for(write);
      if (write.future->state() == State::failed) {
        ++failed;
        write.future->mark_seen();
        CHECK_THROWS_AS(std::rethrow_exception(write.future->value().error), Failure);
        continue;
      }
      while (true) {
        const Transfer read = submit(*engine, file, Direction::read, static_cast<std::uint64_t>(i) * 8000, Bytes(8000));
        wait_for(read);
        read.future->mark_seen();
        if (read.future->state() == State::failed) continue;
        CHECK(*read.bytes == numbered(8000, static_cast<unsigned>(i)));
        break;
      }
    }
    CHECK(failed > 0);
    CHECK(failed < 200);
  }
}

TEST_CASE("io: the engine leaves memory alone after the future is done") {
  for (const BackendKind backend : backends()) {
    Engine::Options options = small(backend);
    options.faults = FaultRates{1, 0, 0, 0, 0, 0, 0, true};
    const Folder folder;
    const auto engine = Engine::start(options);
    const auto file = File::open(folder.file(), Access::read_write, Start::empty, Direct::automatic);
    std::vector<Transfer> writes;
    for (int i = 0; i < 50; ++i)
      writes.push_back(submit(*engine, file, Direction::write, static_cast<std::uint64_t>(i) * 3 * kBlock,
                              numbered(3 * kBlock, static_cast<unsigned>(i))));
    std::atomic<int> freed{0};
    for (Transfer& write : writes) {
      Bytes* const bytes = write.bytes.release();
      write.future->attach(call([bytes, &freed](Future&) {
        delete bytes;
        ++freed;
      }));
    }
    while (engine->statistics().blocks == 0) std::this_thread::yield();  // until the first write has begun
    int cancelled = 0;
    for (const Transfer& write : writes) cancelled += write.future->cancel() ? 1 : 0;
    CHECK(cancelled > 0);
    CHECK(cancelled < 50);
    engine->release_held();
    engine->close();
    engine->join();
    CHECK(freed == 50);
    CHECK(engine->statistics().writes == 50);
  }
}

TEST_CASE("io: an engine without references finishes its operations") {
  for (const BackendKind backend : backends()) {
    const Folder folder;
    const auto file = File::open(folder.file(), Access::read_write, Start::empty, Direct::automatic);
    std::vector<Transfer> writes;
    for (int i = 0; i < 8; ++i) {
      const auto engine = Engine::start(small(backend));
      writes.push_back(submit(*engine, file, Direction::write, static_cast<std::uint64_t>(i) * 100, numbered(100, i)));
      engine->close();
    }
    for (const Transfer& write : writes) {
      wait_for(write);
      CHECK(write.future->state() == State::completed);
    }
    CHECK(file->size() == 800);
  }
}

TEST_CASE("io: strided memory can be gathered and scattered from any offset") {
  std::vector<std::int16_t> numbers(6 * 7 * 8);
  std::iota(numbers.begin(), numbers.end(), std::int16_t{0});
  const std::int64_t sizes[] = {8, 6, 7};
  const std::int64_t strides[] = {1, 56, 8};  // of a permuted tensor
  std::vector<std::int16_t> expected;
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 6; ++j)
      for (int k = 0; k < 7; ++k) expected.push_back(static_cast<std::int16_t>(i + 56 * j + 8 * k));
  Memory memory;
  memory.add_strided(numbers.data(), 2, sizes, strides, 3);
  REQUIRE(memory.size() == 2 * expected.size());
  const auto* const whole = reinterpret_cast<const std::byte*>(expected.data());
  for (std::size_t at = 0; at < memory.size(); at += 5) {
    for (const std::size_t size : {std::size_t{1}, std::size_t{13}, memory.size() - at}) {
      if (at + size > memory.size()) continue;
      std::vector<std::byte> got(size);
      memory.gather(at, size, got.data());
      CHECK(std::memcmp(got.data(), whole + at, size) == 0);
    }
  }
  std::vector<std::int16_t> copy(expected.size());
  Memory target;
  target.add_strided(copy.data(), 2, sizes, strides, 3);
  for (std::size_t at = 0; at < target.size(); at += 11)
    target.scatter(at, std::min<std::size_t>(11, target.size() - at), whole + at);
  CHECK(copy == numbers);
}
