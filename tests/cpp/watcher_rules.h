// The fixture of tests of the watcher, with futures and callbacks to watch.
#pragma once

#include <utility>

#include "callback.h"
#include "core/watcher.h"
#include "fake_device.h"
#include "rules.h"
#include "threads.h"

namespace cudafuture::fake {

// Return a completed future whose event is behind unfinished work.
inline FuturePtr busy(int device_index = 0) {
  accelerator.launch(stream(device_index, 0));
  return completed(EventSet::record(device(device_index)));
}

// Return a callback that is ready to pass to a watcher.
inline Callback* watched(const FuturePtr& parent, Callback::Run run) {
  Callback* c = call(std::move(run));
  c->parent = parent;
  return c;
}

// Marks the thread of the process's watcher as an engine's: it must not enter the runtime.
struct WatcherRules : Rules, FreshAccelerator {
  WatcherRules() {
    Signal ran;
    const FuturePtr future = busy();
    future->attach(call(
        [&](Future&) {
          EngineThread::mark_this_thread();
          ran.send();
        },
        Continuation::when_ready));
    accelerator.finish_all();
    ran.wait();
    settle_watcher();
    accelerator.reset();
  }
};

}  // namespace cudafuture::fake
