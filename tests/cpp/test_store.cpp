// The store under the sanitizers: many threads, disks that fail, truncated journals, and memory that is freed when its
// call is done.
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bytes.h"
#include "callback.h"
#include "fake_runtime.h"
#include "folder.h"
#include "io/failure.h"
#include "io/free_space.h"
#include "rules.h"
#include "store/journal.h"
#include "store/store.h"
#include "store/write_batcher.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;
using namespace cudafuture::io;
using namespace cudafuture::store;

namespace {

// FNV-1a, in place of XXH3, which is in a library that only Python finds.
std::uint64_t fnv(const void* data, std::size_t size, std::uint64_t seed) {
  std::uint64_t hash = 0xcbf29ce484222325 ^ seed;
  for (std::size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
  return hash;
}
[[maybe_unused]] const bool has_hash = (set_hash(fnv), true);

std::shared_ptr<Engine> engine(std::optional<FaultRates> faults = std::nullopt) {
  Engine::Options options;
  options.queue_depth = 4;
  options.block_size = Store::kLeastBlock;
  options.threads = 2;
  options.faults = faults;
  return Engine::start(options);
}

Store::Options durable(const Folder& folder) {
  Store::Options options;
  options.folder = folder.path();
  options.durable = true;
  return options;
}

CallPtr new_call(Call::Kind kind) {
  auto call = std::make_shared<Call>();
  call->kind = kind;
  call->future = pending();
  if (kind == Call::Kind::write) call->future->promise_release();
  return call;
}

// Wait for a call, and return its error; null: none.
std::exception_ptr error_of(const CallPtr& call) {
  call->future->wait_until(nullptr);
  call->future->mark_seen();
  return call->future->value().error;
}

std::exception_ptr write(Store& store, const std::string& key, const Bytes& content,
                         std::optional<std::uint64_t> digest = std::nullopt) {
  Bytes bytes = content;  // freed when the call is done, so that the sanitizer reports a late access
  const CallPtr call = new_call(Call::Kind::write);
  WriteList writes(1);
  writes[0] = {call, key, {c10::ScalarType::Byte, {static_cast<std::int64_t>(bytes.size())}}, {}, 0, digest};
  writes[0].memory.add(bytes.data(), bytes.size());
  store.write(std::move(writes), call);
  call->future->released()->wait_until(nullptr);
  std::fill(bytes.begin(), bytes.end(), std::uint8_t{0xff});
  return error_of(call);
}

std::optional<Bytes> read(Store& store, const std::string& key) {
  EntryPtr entry = store.find(key);
  if (entry == nullptr) return std::nullopt;
  Bytes bytes(entry->size());
  const CallPtr call = new_call(Call::Kind::read);
  ReadList reads(1);
  auto digest = std::make_unique<std::uint64_t>();
  reads[0] = {call, key, std::move(entry), {}, digest.get()};
  reads[0].memory.add(bytes.data(), bytes.size());
  store.read(std::move(reads), call);
  if (error_of(call) != nullptr) std::rethrow_exception(error_of(call));
  CHECK(*digest == digest_of(bytes.data(), bytes.size()));
  return bytes;
}

std::exception_ptr erase(Store& store, const std::string& key) {
  const CallPtr call = new_call(Call::Kind::deletion);
  store.erase({key}, call);
  return error_of(call);
}

std::vector<Record> records_of(const Folder& folder, Damage damage = Damage::refuse) {
  std::vector<Record> records;
  Journal::read(folder.path(), damage, [&](Record&& record, std::uint64_t) { records.push_back(std::move(record)); });
  return records;
}

constexpr std::uint64_t kContent = 2 * 4096;  // offset of a journal's first batch

// Flip one bit of a file at `offset`.
void flip(const std::string& path, std::uint64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const auto byte = static_cast<char>(file.get() ^ 1);
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(byte);
}

void flip(const Folder& folder, std::uint64_t offset) { flip(folder.path() + "/journal", offset); }

Record put(const std::string& key, std::uint64_t sequence) {
  Record record;
  record.key = key;
  record.sequence = sequence;
  record.shape = {c10::ScalarType::Float, {2, 3}};
  record.size = 24;
  record.slab = 1;
  record.offset = 4096;
  record.digest = 42;
  record.has_digest = true;
  record.seed = hash_of(key);
  return record;
}

}  // namespace

TEST_CASE("free space: extents that are released in any order merge into one run") {
  std::minstd_rand random(1);
  for (int round = 0; round < 50; ++round) {
    FreeSpace space(1 << 20);
    std::vector<bool> is_taken(1 << 8);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> taken;
    for (int step = 0; step < 300; ++step) {
      const std::uint64_t size = (1 + random() % 20) << 12;
      if (random() % 2 == 0 || taken.empty()) {
        if (const auto offset = space.take(size)) {
          for (std::uint64_t page = *offset >> 12; page < (*offset + size) >> 12; ++page) {
            CHECK(!is_taken[page]);
            is_taken[page] = true;
          }
          taken.emplace_back(*offset, size);
        }
      } else {
        std::swap(taken[random() % taken.size()], taken.back());
        const auto [offset, length] = taken.back();
        taken.pop_back();
        space.release(offset, length);
        for (std::uint64_t page = offset >> 12; page < (offset + length) >> 12; ++page) is_taken[page] = false;
      }
      const auto free = std::count(is_taken.begin(), is_taken.end(), false);
      CHECK(space.free() == static_cast<std::uint64_t>(free) << 12);
    }
    for (const auto& [offset, size] : taken) space.release(offset, size);
    CHECK(space.runs() == 1);
    CHECK(space.free() == space.size());
  }
}

TEST_CASE("free space: take() and take_at() refuse an extent that is not free") {
  FreeSpace space(10);
  CHECK(space.take_at(3, 4));
  CHECK(!space.take_at(6, 1));
  CHECK(!space.take_at(2, 2));
  CHECK(!space.take_at(9, 2));
  CHECK(!space.take(4));
  CHECK(space.take(3) == std::uint64_t{0});
  CHECK(space.take_at(7, 3));
  CHECK(space.runs() == 0);
}

TEST_CASE("write batcher: full batches are submitted at once, partial ones when idle") {
  Bytes bytes(1000);
  const auto writes = [&](std::size_t count) {
    WriteList made(count);
    for (Write& write : made) write.memory.add(bytes.data(), bytes.size());
    return made;
  };
  WriteBatcher batcher(4096);  // a batch has room for four extents of 1024 bytes each
  CHECK(batcher.add(writes(1)).size() == 1);
  CHECK(batcher.add(writes(3)).empty());
  const auto full = batcher.add(writes(6));
  CHECK(full.size() == 2);
  CHECK(full[0].size() == 4);
  CHECK(batcher.ended().empty());
  CHECK(batcher.ended().empty());
  const auto rest = batcher.ended();
  CHECK(rest.size() == 1);
  CHECK(rest[0].size() == 1);
  CHECK(batcher.ended().empty());
}

TEST_CASE("journal: reading returns all appended records except those that a crash truncated") {
  const Folder folder;
  {
    Journal journal(folder.path(), [](Record&&, std::uint64_t) { FAIL("a new journal has a record"); });
    journal.append({put("a", 1), put("b", 2)});
    Record deletion;
    deletion.key = "a";
    deletion.sequence = 3;
    deletion.is_deletion = true;
    journal.append({deletion});
  }
  const std::string path = folder.path() + "/journal";
  const auto whole = std::filesystem::file_size(path);
  auto records = records_of(folder);
  REQUIRE(records.size() == 3);
  CHECK(records[1].key == "b");
  CHECK(records[1].shape == put("b", 2).shape);
  CHECK(records[1].digest == 42);
  CHECK(records[2].is_deletion);
  for (const auto size : {whole - 1, whole - 20, whole - 45}) {
    std::filesystem::resize_file(path, size);
    CHECK(records_of(folder).size() == 2);
  }
  for (const auto size : {std::uintmax_t{5}, std::uintmax_t{0}}) {  // shorter than a new journal
    std::filesystem::resize_file(path, size);
    CHECK_THROWS_AS(records_of(folder), Failure);
  }
}

TEST_CASE("journal: damage in front of other records is an error") {
  const Folder folder;
  {
    Journal journal(folder.path(), [](Record&&, std::uint64_t) {});
    for (std::uint64_t sequence = 1; sequence < 5; ++sequence) journal.append({put("key", sequence)});
  }
  flip(folder, kContent + 50);
  CHECK_THROWS_AS(records_of(folder), Failure);
}

TEST_CASE("journal: a damaged bit loses at most one record") {
  const Folder folder;
  std::uint64_t end = 0;
  {
    Journal journal(folder.path(), [](Record&&, std::uint64_t) {});
    journal.replace({put("a", 1), put("b", 2), put("c", 3)});
    journal.append({put("d", 4), put("e", 5)});
    journal.append({deletion_of("a", 6)});
    journal.close();
    end = journal.size();
    CHECK(std::filesystem::file_size(folder.path() + "/journal") == end);
  }
  for (std::uint64_t offset = kContent; offset < end; ++offset) {
    flip(folder, offset);
    CHECK_THROWS_AS(records_of(folder), Failure);
    const auto records = records_of(folder, Damage::skip);
    CHECK(records.size() >= 5);
    for (const Record& record : records) CHECK((record.is_deletion || record.shape == put("a", 1).shape));
    flip(folder, offset);
  }
  CHECK(records_of(folder).size() == 6);
}

TEST_CASE("journal: the space reserved for deletions stays allocated after further writes") {
  const Folder folder;
  Journal journal(folder.path(), [](Record&&, std::uint64_t) {});
  const auto blocks = [&] {
    struct stat status = {};
    REQUIRE(::stat((folder.path() + "/journal").c_str(), &status) == 0);
    return static_cast<std::uint64_t>(status.st_blocks) * 512;
  };
  std::uint64_t deletions = 0;
  for (std::uint64_t sequence = 1; sequence < 2000; ++sequence) {
    const Record record = put("key " + std::to_string(sequence), sequence);
    journal.reserve({record});
    journal.append({record});
    std::string bytes;
    append_record(bytes, record);
    CHECK(bytes.size() == size_of(record));
    append_record(bytes = "", deletion_of(record.key, sequence));
    CHECK(bytes.size() == size_of_deletion(record.key));
    deletions += bytes.size();
  }
  CHECK(blocks() >= journal.size() + deletions);
}

TEST_CASE("journal: replace() leaves only the given records") {
  const Folder folder;
  {
    Journal journal(folder.path(), [](Record&&, std::uint64_t) {});
    for (std::uint64_t sequence = 1; sequence < 100; ++sequence) journal.append({put("key", sequence)});
    const std::uint64_t before = journal.size();
    journal.replace({put("key", 99)});
    CHECK(journal.size() - kContent < (before - kContent) / 50);
    journal.append({put("other", 100)});
  }
  const auto records = records_of(folder);
  REQUIRE(records.size() == 2);
  CHECK(records[0].sequence == 99);
  CHECK(records[1].key == "other");
}

TEST_CASE("store: threads write, read and delete correctly on a disk with faults") {
  for (const bool is_durable : {false, true}) {
    const Folder folder;
    Store::Options options = durable(folder);
    options.durable = is_durable;
    const auto disk = engine(FaultRates{5, 0.02, 0.02, 0.05, 0.05, 0.1, 0.3, false});
    const auto store = Store::open(disk, options);
    together(4, [&](int number) {
      std::minstd_rand random(static_cast<unsigned>(number));
      std::map<std::string, Bytes> model;
      for (int step = 0; step < 60; ++step) {
        const std::string key = std::to_string(number) + " " + std::to_string(random() % 5);
        const std::size_t size = random() % 4 == 0 ? random() % 600'000 : random() % 3000;
        const auto known = model.find(key);
        switch (random() % 3) {
          case 0:
            if (write(*store, key, numbered(size, random())) == nullptr) model.erase(key);
            break;
          case 1:
            try {
              const auto got = read(*store, key);
              if (known != model.end()) CHECK(got == known->second);
            } catch (const Failure& e) {
              CHECK(e.kind() == FailureKind::storage);
            }
            break;
          default: {
            const Bytes content = numbered(size, random());
            const bool is_wrong = random() % 4 == 0;
            if (write(*store, key, content, digest_of(content.data(), size) + is_wrong) == nullptr) {
              CHECK(!is_wrong);
              model[key] = content;
            }
            if (random() % 4 == 0 && erase(*store, key) == nullptr) model.erase(key);
          }
        }
      }
    });
    const FuturePtr flushed = store->flush();
    flushed->wait_until(nullptr);
    flushed->mark_seen();
    CHECK(store->statistics().used == store->statistics().bytes);
    CHECK(store->statistics().checksum_errors == 0);
    for (const std::string& key : store->keys()) CHECK(erase(*store, key) == nullptr);
    CHECK(store->statistics().used == 0);
    store->trim();
    CHECK(store->statistics().slabs == 0);
    store->close();
    disk->close();
    disk->join();
  }
}

TEST_CASE("store: a durable store has its keys after it is opened again") {
  const Folder folder;
  const auto disk = engine();
  for (unsigned round = 0; round < 3; ++round) {
    const auto store = Store::open(disk, durable(folder));
    for (unsigned i = 0; i < 20 && round > 0; ++i) {
      CHECK(read(*store, std::to_string(i)) == numbered(i * 10'000, i + round - 1));
    }
    for (unsigned i = 0; i < 20; ++i)
      CHECK(write(*store, std::to_string(i), numbered(i * 10'000, i + round)) == nullptr);
    store->close();
  }
  disk->close();
  disk->join();
}

TEST_CASE("store: merged reads verify their checksums singly") {
  const Folder folder;
  const auto disk = engine();
  const auto store = Store::open(disk, durable(folder));
  for (const char* key : {"a", "b"}) REQUIRE(write(*store, key, numbered(1000, 1)) == nullptr);
  flip(store->find("a")->extent.slab().file->path(), store->find("a")->extent.offset());
  const auto error_of_reads = [&](bool verifies_a, bool verifies_b) {
    std::vector<Bytes> bytes(2, Bytes(1000));
    const CallPtr call = new_call(Call::Kind::read);
    ReadList reads(2);
    reads[0] = {call, "a", store->find("a"), {}, nullptr, 0, verifies_a};
    reads[1] = {call, "b", store->find("b"), {}, nullptr, 0, verifies_b};
    for (std::size_t i = 0; i < 2; ++i) reads[i].memory.add(bytes[i].data(), bytes[i].size());
    store->read(std::move(reads), call);
    const std::exception_ptr error = error_of(call);
    CHECK(bytes[0] != numbered(1000, 1));
    CHECK(bytes[1] == numbered(1000, 1));
    return error;
  };
  CHECK(error_of_reads(false, false) == nullptr);
  CHECK(error_of_reads(false, true) == nullptr);
  CHECK(store->statistics().checksum_errors == 0);
  CHECK(error_of_reads(true, false) != nullptr);
  CHECK(store->statistics().checksum_errors == 1);
  disk->close();
  disk->join();
}

TEST_CASE("store: a pending write outlives the last reference to the store") {
  const Folder folder;
  const auto disk = engine(FaultRates{0, 0, 0, 0, 0, 0, 0, true});
  auto store = Store::open(disk, durable(folder));
  const CallPtr call = new_call(Call::Kind::write);
  Bytes bytes = numbered(1000, 1);
  WriteList writes(1);
  writes[0] = {call, "key", {c10::ScalarType::Byte, {1000}}, {}, 0};
  writes[0].memory.add(bytes.data(), bytes.size());
  store->write(std::move(writes), call);
  store = nullptr;
  disk->release_held();
  CHECK(error_of(call) == nullptr);
  disk->close();
  disk->join();
}
