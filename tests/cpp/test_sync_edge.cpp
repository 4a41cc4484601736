// The names of the synchronisation edges, and the seam that cuts one.
#include "core/sync_edge.h"

#include <set>
#include <string_view>

#include "rules.h"

using namespace cudafuture;

TEST_SUITE_BEGIN("edge");

namespace {

constexpr int kCount = static_cast<int>(Edge::count);

}  // namespace

TEST_CASE("every edge has a name of its own, and is found by it") {
  std::set<std::string_view> names;
  for (int i = 1; i < kCount; ++i) {
    const Edge edge = static_cast<Edge>(i);
    CHECK(edge_of(name_of(edge)) == edge);
    names.insert(name_of(edge));
  }
  CHECK(names.size() == kCount - 1);
  CHECK(edge_of("no such edge") == Edge::none);
  CHECK(edge_of("") == Edge::none);
}

TEST_CASE("every edge stands until it is cut, and then only that one does not") {
  for (int i = 1; i < kCount; ++i) CHECK(stands(static_cast<Edge>(i)));
  cut_edge = Edge::join_wait;
  for (int i = 1; i < kCount; ++i) {
    const Edge edge = static_cast<Edge>(i);
    CHECK(stands(edge) == (edge != Edge::join_wait));
  }
  cut_edge = Edge::none;
}

TEST_SUITE_END();
