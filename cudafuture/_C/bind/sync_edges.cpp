// The interface through which tests cut one sync edge.
#include "core/sync_edge.h"

#include <nanobind/stl/string_view.h>

#include <optional>
#include <string>

#include "bind/future.h"

namespace cudafuture::bind {
namespace {

SyncEdge sync_edge_from(std::string_view name) {
  const SyncEdge edge = sync_edge_of(name);
  if (edge == SyncEdge::none) {
    const std::string message = "no sync edge is named '" + std::string(name) + "'; see _C.sync_edges()";
    throw nb::value_error(message.c_str());
  }
  return edge;
}

nb::list sync_edges() {
  nb::list names;
  for (int i = 1; i < static_cast<int>(SyncEdge::count); ++i) {
    const std::string_view name = name_of(static_cast<SyncEdge>(i));
    names.append(nb::str(name.data(), name.size()));
  }
  return names;
}

void cut(nb::handle name) {
  cut_sync_edge = name.is_none() ? SyncEdge::none : sync_edge_from(nb::cast<std::string_view>(name));
}

}  // namespace

void bind_sync_edges(nb::module_& m) {
  m.def("sync_edges", sync_edges);
  m.def("cut_sync_edge", cut, nb::arg("name").none());
  m.def("has_sync_edge", [](std::string_view name) { return stands(sync_edge_from(name)); }, nb::arg("name"));
}

}  // namespace cudafuture::bind
