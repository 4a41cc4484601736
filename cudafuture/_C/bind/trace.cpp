#include <string>
#include <system_error>

#include "bind/future.h"
#include "core/trace_recorder.h"

namespace cudafuture::bind {
namespace {

std::string start_trace(const std::string& path, const std::string& header) {
  try {
    const WithoutGil released;
    return TraceRecorder::get().start(path, header);
  } catch (const std::system_error& e) {
    errno = e.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
    throw nb::python_error();
  }
}

nb::object stop_trace(const std::string& trailer) {
  TraceRecorder::End end;
  {
    const WithoutGil released;
    end = TraceRecorder::get().stop(trailer);
  }
  return nb::make_tuple(end.lost, end.failure);
}

}  // namespace

void bind_trace(nb::module_& m) {
  m.def("start_trace", start_trace, nb::arg("path"), nb::arg("header"));
  m.def("stop_trace", stop_trace, nb::arg("trailer"));
  m.def("is_tracing", [] { return TraceRecorder::get().is_recording(); });
  m.def(
      "trace_span",
      [](bool is_begin, const std::string& name) {
        TraceRecorder::span(is_begin ? TraceEvent::span_begin : TraceEvent::span_end, name);
      },
      nb::arg("is_begin"), nb::arg("name"));
}

}  // namespace cudafuture::bind
