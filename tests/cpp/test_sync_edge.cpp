// The names of the sync edges, and the variable with which tests cut one.
#include "core/sync_edge.h"

#include <set>
#include <string_view>

#include "rules.h"

using namespace cudafuture;

TEST_SUITE_BEGIN("sync_edge");

namespace {

constexpr int kCount = static_cast<int>(SyncEdge::count);

}  // namespace

TEST_CASE("each sync edge has a unique name that finds it") {
  std::set<std::string_view> names;
  for (int i = 1; i < kCount; ++i) {
    const SyncEdge edge = static_cast<SyncEdge>(i);
    CHECK(sync_edge_of(name_of(edge)) == edge);
    names.insert(name_of(edge));
  }
  CHECK(names.size() == kCount - 1);
  CHECK(sync_edge_of("no such edge") == SyncEdge::none);
  CHECK(sync_edge_of("") == SyncEdge::none);
}

TEST_CASE("all sync edges stand, except the one that is cut") {
  for (int i = 1; i < kCount; ++i) CHECK(stands(static_cast<SyncEdge>(i)));
  cut_sync_edge = SyncEdge::join_wait;
  for (int i = 1; i < kCount; ++i) {
    const SyncEdge edge = static_cast<SyncEdge>(i);
    CHECK(stands(edge) == (edge != SyncEdge::join_wait));
  }
  cut_sync_edge = SyncEdge::none;
}

TEST_SUITE_END();
