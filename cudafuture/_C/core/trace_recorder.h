// The recorder behind the trace hook: events of all threads, in one file.
//
//     trace() on a thread ──► ring of that thread ──► thread cudafuture-rec ──► file
//                             full: counted                  full disk: no more events
//     events of futures that are done ────────────► it asks the devices when they were reached
//
// A thread never blocks on another one: it alone writes its ring, and the recorder's thread alone reads it. The file
// has what happened up to a tenth of a second before the process was killed. `cudafuture/trace/_file.py` reads it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/trace.h"

namespace cudafuture {

class TraceRecorder {
 public:
  static TraceRecorder& get() noexcept;

  // Begins to record into a new file. `header`: JSON text for its readers. Throws std::system_error if the file cannot
  // be made, and Error if there is a recording. Returns why an earlier file could not be written; empty: it could.
  std::string start(const std::string& path, const std::string& header);
  // Writes what has happened, and `trailer`, JSON text for the readers; ends the recording.
  struct End {
    std::uint64_t lost = 0;  // events for which a ring had no room
    std::string failure;     // why the file could not be written any more; empty: it is complete
  };
  End stop(const std::string& trailer);
  bool is_recording() const noexcept;
  // Lets the recorder's thread read the rings now.
  void wake() noexcept;

  // Records when the devices reach the events of a future that is done, if these have timing. `done`: the time of that
  // record, by which readers know the future.
  void follow_devices(const Future& future, std::int64_t done) noexcept;

  // Adds the begin or the end of a part of the program. Without a recording: nothing.
  static void span(TraceEvent event, std::string_view name) noexcept;

 private:
  struct State;

  TraceRecorder() noexcept;

  std::unique_ptr<State> state_;
};

}  // namespace cudafuture
