#include "api/promise.h"

#include "api/implementation.h"
#include "bind/future.h"
#include "core/callback_thread.h"
#include "core/process.h"

namespace cudafuture::api {

NativePromise::NativePromise(std::string name, int priority, bool has_released, const OperationFacts& facts)
    : core_(c10::make_intrusive<Future>(priority)) {
  core_->set_name(std::move(name));
  core_->set_default_executor(&CallbackThread::get());
  if (has_released) core_->promise_release();
  core_->set_operation(facts);
  core_->start();
}

NativePromise::~NativePromise() {
  if (is_shut_down() || is_forked_child()) return;
  core_->release();
  if (core_->done() || core_.use_count() == 1) return;
  const std::string name = core_->name().empty() ? "this future" : "'" + core_->name() + "'";
  core_->fail(Value::of_error(std::make_exception_ptr(
      Error(ErrorKind::invalid_state, "the promise of " + name + " was dropped before the future was done"))));
}

_object* NativePromise::future() {
  return call_with_gil([this] { return bind::wrap(core_).release().ptr(); });
}

void NativePromise::complete(c10::IValue value) noexcept { complete(Value::of_native(std::move(value)), {}); }

void NativePromise::fail(_object* exception) noexcept { fail(exception, EventSet()); }

// A thread without the GIL cannot add a note or read the traceback; the exception was not raised in Python then.
void NativePromise::fail(_object* exception, EventSet&& events) noexcept {
  Foreign traceback;
  if (foreign_runtime().inside()) {
    bind::add_note(exception, core_->name());
    traceback = Foreign(PyException_GetTraceback(exception));
  }
  fail(Value::of_error(Foreign(exception), std::move(traceback)), std::move(events));
}

std::shared_ptr<Promise> make_promise(std::string name, int priority, bool has_released, const std::string& worker) {
  const OperationFacts facts{worker.empty() ? nullptr : &OperationPlace::find("worker", worker, "to")};
  return std::make_shared<NativePromise>(std::move(name), priority, has_released, facts);
}

}  // namespace cudafuture::api
