// Read coalescer: which waiting reads are submitted, and which of them are merged.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "folder.h"
#include "io/page.h"
#include "rules.h"
#include "store/read_coalescer.h"

using namespace cudafuture::io;
using namespace cudafuture::store;

namespace {

EntryPtr entry_at(Extent&& extent) {
  const auto entry = std::make_shared<Entry>();
  entry->extent = std::move(extent);
  return entry;
}

Memory memory_of(std::size_t size) {
  Memory memory;
  memory.skip(size);
  return memory;
}

}  // namespace

TEST_CASE("read coalescer: waiting reads are merged when few are in flight") {
  const Folder folder;
  const auto slabs = std::make_shared<Slabs>(Slabs::Options{folder.path(), Direct::no});
  slabs->reserve(8 * 4096);
  std::vector<Extent> extents = slabs->take(std::vector<std::uint64_t>(8, 4096));
  ReadCoalescer coalescer(1, 3 * 4096 + kPage);  // room for three adjacent reads
  const auto add = [&](std::size_t i) {
    return coalescer.add({nullptr, std::to_string(i), entry_at(std::move(extents[i])), memory_of(4096)});
  };
  const auto keys = [](const std::vector<Reads>& transfers) {
    std::vector<std::string> lines;
    for (const Reads& reads : transfers) {
      lines.emplace_back();
      for (const Read& read : reads) lines.back() += read.key;
    }
    return lines;
  };
  using Lines = std::vector<std::string>;
  CHECK(keys(add(6)) == Lines{"6"});
  CHECK(keys(add(0)) == Lines{"0"});
  for (const std::size_t i : {5, 2, 1, 4, 7}) CHECK(add(i).empty());
  CHECK(keys(coalescer.ended()) == Lines{"12", "45", "7"});  // another read is still in flight
  for (int i = 0; i < 2; ++i) CHECK(coalescer.ended().empty());
  CHECK(add(3).empty());
  CHECK(keys(coalescer.ended()) == Lines{"3"});
  for (int i = 0; i < 2; ++i) CHECK(coalescer.ended().empty());
  CHECK(slabs->statistics().used == 0);
}

TEST_CASE("read coalescer: a new read does not overtake waiting reads") {
  const Folder folder;
  const auto slabs = std::make_shared<Slabs>(Slabs::Options{folder.path(), Direct::no});
  const auto read = [&](const char* key) {
    slabs->reserve(4096);
    return Read{nullptr, key, entry_at(std::move(slabs->take({4096}).front())), memory_of(4096)};
  };
  ReadCoalescer coalescer(2, 4096);
  for (int i = 0; i < 4; ++i) CHECK(coalescer.add(read("first")).size() == 1);
  CHECK(coalescer.add(read("waits")).empty());
  CHECK(coalescer.ended().empty());
  CHECK(coalescer.add(read("late")).empty());  // waits, although fewer than two reads are in flight
  const auto both = coalescer.ended();
  REQUIRE(both.size() == 2);
  CHECK(both[0][0].key == "waits");
  CHECK(both[1][0].key == "late");
}
