// The native module cudafuture._C, for the Python files of the package.
#include <chrono>

#include "bind/errors.h"
#include "bind/executors.h"
#include "bind/future.h"
#include "core/callback_thread.h"
#include "core/process.h"
#include "core/watcher.h"

namespace cudafuture::bind {
namespace {

nb::dict statistics() {
  const EventPool::Statistics events = EventPool::get().statistics();
  const Watcher::Statistics watcher = Watcher::get().statistics();
  nb::dict d;
  d["callbacks_run_on_callback_thread"] = CallbackThread::get().callbacks_run();
  d["events_made"] = events.made;
  d["events_reused"] = events.reused;
  d["events_idle"] = events.idle;
  d["watcher_polls"] = watcher.polls;
  d["watcher_wakeups"] = watcher.wakeups;
  d["watcher_watched"] = watcher.watched;
  d["watcher_pending"] = watcher.pending;
  return d;
}

PyObject* interrupt = nullptr;  // Ctrl-C during the last callbacks

void shut_down_at_exit() {
  log_unseen_failures();
  keep_threads_from_unwinding();
  {
    const WithoutGil released;  // the threads may need it to finish
    shut_down([]() noexcept {
      const PyGILState_STATE state = PyGILState_Ensure();
      const bool interrupted = PyErr_CheckSignals() != 0;
      if (interrupted) interrupt = take_current_exception().release().ptr();
      PyGILState_Release(state);
      return !interrupted;
    });
  }
  if (interrupt != nullptr) raise(nb::steal(std::exchange(interrupt, nullptr)));
}

}  // namespace
}  // namespace cudafuture::bind

NB_MODULE(_C, m) {
  using namespace cudafuture;        // NOLINT
  using namespace cudafuture::bind;  // NOLINT
  nb::set_leak_warnings(false);      // futures that live until the process ends are not leaks
  install_runtime();
  install_translators();
  bind_future(m);
  bind_unseen_failure(m);
  bind_events(m);
  bind_streams(m);
  bind_executors(m);
  bind_order(m);
  bind_combine(m);
  bind_arrivals(m);
  bind_await(m);
  bind_work_errors(m);
  bind_collective(m);
  bind_pending(m);
  bind_trace(m);
  bind_gloo(m);
  bind_messages(m);
  bind_sync_edges(m);
  bind_host_clock(m);
  bind_storage(m);
  bind_digests(m);
  bind_buffer_pool(m);
  bind_batch_copy(m);
  bind_store(m);
  m.attr("inline_executor") = cudafuture::bind::HostExecutor{"inline", &InlineExecutor::get()};
  m.attr("callback_thread") = cudafuture::bind::HostExecutor{"callback_thread", &CallbackThread::get()};
  m.def("statistics", statistics);
  m.def(
      "set_watcher_pauses",
      [](double first, double longest) {
        using seconds = std::chrono::duration<double>;
        using std::chrono::duration_cast;
        using std::chrono::microseconds;
        Watcher::get().set_pauses(duration_cast<microseconds>(seconds(first)),
                                  duration_cast<microseconds>(seconds(longest)));
      },
      nb::arg("first"), nb::arg("longest"));
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(shut_down_at_exit));
}
