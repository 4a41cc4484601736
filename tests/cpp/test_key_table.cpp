// The key table of a store, compared with a std::map.
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "rules.h"
#include "store/key_table.h"

using namespace cudafuture::store;

namespace {

using Table = KeyTable<int>;

void expect_same(const Table& table, const std::map<std::string, int>& model) {
  std::map<std::string, int> found;
  table.for_each([&](const Table::Node& entry) { found.emplace(entry.key(), entry.value); });
  CHECK(found == model);
  CHECK(table.size() == model.size());
}

}  // namespace

TEST_CASE("key table: random operations agree with a map, also across wrap-around") {
  std::mt19937 random(0);
  Table table;
  std::map<std::string, int> model;
  for (int step = 0; step < 20'000; ++step) {
    const std::string key(random() % 40, 'k');  // few keys, so that runs of slots form and break up
    const std::string name = key + std::to_string(random() % 4);
    Table::Node* const known = table.find(name);
    REQUIRE((known != nullptr) == model.contains(name));
    if (known != nullptr && random() % 2 == 0) {
      table.erase(known);
      model.erase(name);
    } else {
      table.find_or_add(name).value = model[name] = step;
    }
    if (step % 1'000 == 0) expect_same(table, model);
  }
  expect_same(table, model);
}

TEST_CASE("key table: batches of any length return the entries of single lookups") {
  for (const std::size_t count : {0, 1, 7, 8, 9, 16, 23, 24, 25, 1'000}) {
    Table table;
    std::vector<std::string> keys;
    for (std::size_t i = 0; i < count; ++i) keys.push_back("key " + std::to_string(i * 7 % count));
    int loads = 0;
    Table::Batch adding(
        table, count, [&](std::size_t i) { return std::string_view(keys[i]); }, [](const Table::Node&) {});
    for (std::size_t i = 0; i < count; ++i) table.find_or_add(keys[i], adding.hash(i)).value = static_cast<int>(i);
    Table::Batch finding(
        table, count, [&](std::size_t i) { return std::string_view(keys[i]); }, [&](const Table::Node&) { ++loads; });
    for (std::size_t i = 0; i < count; ++i) {
      Table::Node* const found = table.find(keys[i], finding.hash(i));
      REQUIRE(found != nullptr);
      CHECK(found == table.find(keys[i]));
      CHECK(found->key() == keys[i]);
    }
    CHECK(loads == static_cast<int>(count));
  }
}
