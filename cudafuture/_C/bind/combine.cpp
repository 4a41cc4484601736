// gather, collect_all and collect_any: a future made from many.
//
//     part ── CombinedPart ──┐
//     part ── CombinedPart ──┼──► Combined (counts down) ──► the future of all
//     part ── CombinedPart ──┘
//
// CombinedParts hold the combined future, and the Combined holds the parts, as Python objects: the collector sees every
// reference.
#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "bind/errors.h"
#include "bind/future.h"
#include "bind/work.h"
#include "core/callback_thread.h"
#include "core/ordered_executor.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

class Combined;

// Continuation of one part.
class CombinedPart final : public Continuation {
 public:
  void run(Future& part) noexcept override;
  void abandon() noexcept override;
  Future* dependent() const noexcept override { return whole == nullptr ? nullptr : &core_of(whole); }
  int visit(ForeignVisitor visitor) const override;

  std::shared_ptr<Combined> combined;
  PyObject* whole = nullptr;  // owned
  std::size_t index = 0;

 private:
  void release() noexcept;
};

// Cancels futures without deep recursion. Parts that are gathers call this again; beyond a depth, they add theirs to
// the list of the outermost call. `reason`: the error that their callers get; null: made on request.
void cancel_in_turn(std::vector<nb::object> futures, nb::handle reason) {
  constexpr int kMaxDepth = 100;
  static thread_local std::vector<nb::object>* outermost = nullptr;
  static thread_local int depth = 0;
  if (depth == kMaxDepth) {
    std::move(futures.begin(), futures.end(), std::back_inserter(*outermost));
    return;
  }
  std::vector<nb::object>* const above = depth++ == 0 ? std::exchange(outermost, &futures) : nullptr;
  while (!futures.empty()) {
    const nb::object future = std::move(futures.back());
    futures.pop_back();
    core_of(future).cancel(reason.is_valid() ? Value::of_error(foreign(nb::borrow(reason)), {}) : Value());
  }
  if (--depth == 0) outermost = above;
}

class Combined final : public Producer, public std::enable_shared_from_this<Combined> {
 public:
  Combined(Maker how, std::vector<PyObject*> parts, bool cancel_parts)
      : links(parts.size()), how_(how), cancel_parts_(cancel_parts), parts_(std::move(parts)), left_(parts_.size()) {}

  ~Combined() override { release_parts(); }

  // Detaches from parts that are still pending, so that they keep neither the combined future nor this object alive.
  // They are cancelled only when the combined future is cancelled for good: a callback of a part may still complete it.
  void finished(Future& whole) noexcept override {
    if (left_.load(std::memory_order_relaxed) > 0) take_back_links();
    if (cancel_parts_ && whole.state() == State::cancelled) {
      std::vector<nb::object> parts;
      for (PyObject* part : parts_) parts.push_back(nb::borrow(nb::handle(part)));
      cancel_in_turn(std::move(parts), static_cast<PyObject*>(whole.value().object.get()));
    }
    release_parts();
  }

  int visit(ForeignVisitor visitor) const override {
    for (PyObject* part : parts_) {
      if (const int stop = visitor(part)) return stop;
    }
    return 0;
  }

  void add_parts(std::vector<CombinationPart>& parts) const override {
    for (PyObject* part : parts_) parts.push_back({WeakFuture(core_of(part)), Py_REFCNT(part)});
  }

  // Notes that one part is done. Returns false if the outcome is decided in a way that needs the interpreter, and this
  // thread is outside it.
  bool part_done(Future& whole, std::size_t index, Future& part) noexcept {
    const bool last = left_.fetch_sub(1, std::memory_order_acq_rel) == 1;
    const bool completed = part.state() == State::completed;
    if (how_ == Maker::gather && completed) {
      if (!last || whole.done()) return true;
      return foreign_runtime().inside() && finish_whole(whole, index, part);
    }
    if (how_ == Maker::collect_all && !last) return true;
    if (how_ == Maker::collect_any && !completed && !last) return true;
    if (whole.done()) return true;
    return foreign_runtime().inside() && finish_whole(whole, index, part);
  }

  bool finish_whole(Future& whole, std::size_t index, Future& part) noexcept {
    if (whole.done()) return true;
    const std::shared_ptr<Combined> alive = shared_from_this();  // completing the combined future drops its producer
    try {
      switch (how_) {
        case Maker::gather:
          finish_gather(whole, part);
          break;
        case Maker::collect_all:
          finish_all(whole);
          break;
        default:
          finish_any(whole, index, part);
      }
    } catch (...) {
      fail(whole, exception_of(std::current_exception()));
    }
    return true;
  }

  nb::object as_list() const {
    nb::list list;
    for (PyObject* part : parts_) list.append(nb::handle(part));
    return list;
  }

  std::vector<CombinedPart> links;  // the nodes in the parts' lists; never resized

 private:
  void take_back_links() noexcept {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      if (core_of(parts_[i]).detach(&links[i])) links[i].abandon();
    }
  }

  void release_parts() noexcept {
    for (PyObject* part : std::exchange(parts_, {})) release_foreign(part);
  }

  // The outcome is decided: callers drop the parts, and of those that have failed, or will, one failure is reported.
  void share_failure_report(Future& whole) const {
    for (PyObject* part : parts_) {
      if (core_of(part).state() != State::completed) Future::share_failure_report(whole, core_of(part));
    }
  }

  EventSet joined(int priority) const {
    std::vector<const EventSet*> sets;
    for (PyObject* part : parts_) {
      const EventSet& events = core_of(part).events();
      if (!events.empty()) sets.push_back(&events);
    }
    return sets.empty() ? EventSet() : EventSet::join(sets, priority);
  }

  void inherit_async_errors(Future& whole) const {
    for (PyObject* part : parts_) whole.inherit_async_errors(core_of(part));
  }

  void inherit_host_times(Future& whole) const {
    for (PyObject* part : parts_) whole.inherit_host_time(core_of(part));
  }

  void finish_gather(Future& whole, Future& part) {
    if (part.state() != State::completed) {
      whole.inherit_host_time(part);
      share_failure_report(whole);
      fail_after(whole, exception_of(part), kept(part.events(), SyncEdge::gather_failure_events));
      return;
    }
    const nb::object parts = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(parts_.size())));
    if (!parts.is_valid()) throw nb::python_error();
    std::vector<at::Tensor> named;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      PyTuple_SET_ITEM(parts.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(parts_[i]));
      const auto& more = core_of(parts_[i]).named_tensors();
      named.insert(named.end(), more.begin(), more.end());
    }
    if (!stands(SyncEdge::gather_tensors)) named.clear();
    inherit_async_errors(whole);
    inherit_host_times(whole);
    Value values = Value::of_parts(foreign(parts));
    EventSet events = kept(joined(whole.priority()), SyncEdge::gather_events);
    if (!events.empty()) values.native = searches_of(parts_);
    whole.complete(std::move(values), std::move(events), std::move(named));
  }

  // Consumers of the combined future may use the values of the parts.
  void finish_all(Future& whole) {
    EventSet events = kept(joined(whole.priority()), SyncEdge::gather_events);
    std::vector<at::Tensor> used;
    if (!events.empty()) {
      for (PyObject* part : parts_) {
        const std::vector<at::Tensor> more = tensors_of(core_of(part));
        used.insert(used.end(), more.begin(), more.end());
      }
    }
    if (!stands(SyncEdge::gather_tensors)) used.clear();
    inherit_async_errors(whole);
    inherit_host_times(whole);
    whole.complete(Value::of_object(foreign(as_list())), std::move(events), std::move(used));
  }

  void finish_any(Future& whole, std::size_t index, Future& part) {
    if (part.state() == State::completed) {
      share_failure_report(whole);
      whole.inherit_async_errors(part);
      whole.inherit_host_time(part);
      Value value = Value::of_object(foreign(nb::make_tuple(index, result_of(part))));
      if (part.value().form == Value::Form::object) value.native = part.value().native;
      whole.complete(std::move(value), kept(part.events(), SyncEdge::any_events),
                     std::vector<at::Tensor>(part.named_tensors()));
      return;
    }
    inherit_host_times(whole);
    nb::list errors;
    for (PyObject* p : parts_) errors.append(exception_of(core_of(p)));
    const nb::object type = nb::module_::import_("cudafuture.errors").attr("AllFailedError");
    const nb::str message(("all " + std::to_string(parts_.size()) + " futures given to collect_any failed").c_str());
    fail_after(whole, call(type, message, errors), kept(joined(whole.priority()), SyncEdge::any_failure_events));
  }

  Maker how_;
  bool cancel_parts_;
  std::vector<PyObject*> parts_;  // owned
  std::atomic<std::size_t> left_;
};

// Finishes the combined future on the callback thread.
class Finish final : public Continuation {
 public:
  // Takes over the link's reference to the combined future. A reference to its core would not do: the core's count must
  // never rise from one outside the interpreter, or the collector sees two different graphs.
  Finish(std::shared_ptr<Combined> combined, Foreign whole, std::size_t index)
      : Continuation(foreign), combined_(std::move(combined)), whole_(std::move(whole)), index_(index) {}
  void run(Future& part) noexcept override {
    combined_->finish_whole(core_of(future()), index_, part);
    delete this;
  }
  bool refuse(const std::exception_ptr& error) noexcept override {
    core_of(future()).fail(Value::of_error(error));
    return true;
  }
  void abandon() noexcept override {
    break_promise(nb::borrow(future()));
    delete this;
  }

 private:
  nb::handle future() const { return static_cast<PyObject*>(whole_.get()); }

  std::shared_ptr<Combined> combined_;
  Foreign whole_;
  std::size_t index_;
};

void CombinedPart::run(Future& part) noexcept {
  Future& future = core_of(whole);
  if (!combined->part_done(future, index, part)) {
    auto* finish = new Finish(combined, Foreign(std::exchange(whole, nullptr)), index);
    finish->parent = FuturePtr::unsafe_reclaim_from_nonowning(&part);
    CallbackThread::get().post(finish);
  }
  release();
}

void CombinedPart::abandon() noexcept { release(); }

int CombinedPart::visit(ForeignVisitor visitor) const { return visitor(whole); }

// The link lives in the Combined, which may be destroyed here.
void CombinedPart::release() noexcept {
  PyObject* const future = std::exchange(whole, nullptr);
  const std::shared_ptr<Combined> last = std::move(combined);
  if (future != nullptr) release_foreign(future);
}

// Returns the order of the combined future's callbacks: that of the first part that has one, at the deepest step among
// the parts of that order.
OrderedExecutor* order_of(const std::vector<PyObject*>& parts) {
  OrderedExecutor* order = nullptr;
  for (PyObject* part : parts) {
    OrderedExecutor* const own = core_of(part).ordered_executor();
    if (own == nullptr) continue;
    if (order == nullptr || (own->shares_queues_with(*order) && own->depth() > order->depth())) order = own;
  }
  return order;
}

nb::object combine(Maker how, nb::handle futures, bool cancel_parts) {
  const ParkingScope parking;
  refuse_after_fork();
  std::vector<PyObject*> parts;
  const nb::object sequence =
      nb::steal(PySequence_Tuple(futures.ptr()));  // keeps the parts alive until this function ends
  if (!sequence.is_valid()) throw nb::python_error();
  const Py_ssize_t count = PyTuple_GET_SIZE(sequence.ptr());
  parts.reserve(static_cast<std::size_t>(count));
  int priority = 0;  // the most urgent part's
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Future& part = expect_future(PyTuple_GET_ITEM(sequence.ptr(), i), "combining");
    priority = i == 0 ? part.priority() : std::min(priority, part.priority());
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const given = PyTuple_GET_ITEM(sequence.ptr(), i);
    parts.push_back(core_of_or_null(given) != nullptr ? Py_NewRef(given) : future_of_work(given).release().ptr());
  }

  auto core = c10::make_intrusive<Future>(priority);
  Future& whole = *core;
  whole.set_maker(how);
  if (OrderedExecutor* order = order_of(parts)) whole.set_default_executor(order);
  const nb::object wrapper = wrap(core);
  core.reset();
  auto combined = std::make_shared<Combined>(how, parts, cancel_parts);
  if (parts.empty()) {
    if (how == Maker::collect_any)
      throw nb::value_error("collect_any() needs at least one future: none can be the first");
    whole.complete(Value::of_object(foreign(nb::list())));
    return wrapper;
  }
  whole.set_producer(combined);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    CombinedPart& link = combined->links[i];
    link.combined = combined;
    link.whole = wrapper.inc_ref().ptr();
    link.index = i;
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (whole.done()) {  // a part that was already done has decided the outcome
      combined->links[i].abandon();
    } else {
      core_of(parts[i]).attach(&combined->links[i]);
    }
  }
  raise_kept_interrupt();
  return wrapper;
}

}  // namespace

void bind_combine(nb::module_& m) {
  m.def(
      "gather", [](nb::handle f, bool cancel_parts) { return combine(Maker::gather, f, cancel_parts); },
      nb::arg("futures"), nb::arg("cancel_parts") = false);
  m.def("collect_all", [](nb::handle f) { return combine(Maker::collect_all, f, false); }, nb::arg("futures"));
  m.def("collect_any", [](nb::handle f) { return combine(Maker::collect_any, f, false); }, nb::arg("futures"));
}

}  // namespace cudafuture::bind
