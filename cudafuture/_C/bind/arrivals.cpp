// Waits for the first of several futures, for Python: wait() and as_completed().
#include "core/arrivals.h"

#include <memory>
#include <utility>
#include <vector>

#include "bind/future.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

// The futures that next() has not returned yet.
class Outstanding final : public Producer {
 public:
  int visit(ForeignVisitor visitor) const override {
    for (const Foreign& future : futures_) {
      if (const int stop = visitor(future.get())) return stop;
    }
    return 0;
  }

  void add_parts(std::vector<CombinationPart>& parts) const override {
    std::lock_guard lock(mutex_);
    for (const Foreign& future : futures_) {
      auto* const object = static_cast<PyObject*>(future.get());
      if (object == nullptr) continue;
      if (Future* core = core_of_or_null(object)) parts.push_back({WeakFuture(*core), Py_REFCNT(object)});
    }
  }

  void add(nb::handle future) { futures_.push_back(foreign(nb::borrow(future))); }

  nb::object take(std::size_t position) {
    std::lock_guard lock(mutex_);
    return nb::steal(static_cast<PyObject*>(futures_[position].take()));
  }

 private:
  mutable std::mutex mutex_;      // the walk over pending futures reads without the GIL
  std::vector<Foreign> futures_;  // null: returned
};

// Keeps the futures' Python objects, and shows them to the cyclic collector.
class PyArrivals {
 public:
  explicit PyArrivals(const nb::iterable& futures) {
    std::vector<Future*> cores;
    for (nb::handle future : futures) {
      cores.push_back(&expect_future(future, "waiting"));
      outstanding_->add(future);
    }
    arrivals_ = std::make_unique<Arrivals>(std::move(cores));
  }

  // Returns the next future that is done, and keeps no reference to it; None after the timeout, or after close().
  nb::object next(nb::handle timeout) {
    const ParkingScope parking;
    refuse_after_fork();
    const Deadline deadline = deadline_in(timeout);
    while (arrivals_ != nullptr) {
      std::size_t position = 0;
      if (arrivals_->take(position)) {
        nb::object future = outstanding_->take(position);
        core_of(future).observe();
        return future;
      }
      const FuturePtr signal = arrivals_->next(outstanding_);
      if (!try_wait_until_done(*signal, deadline)) break;
    }
    return nb::none();
  }

  void close() noexcept {
    std::unique_ptr<Arrivals> old = std::move(arrivals_);
    if (is_forked_child()) static_cast<void>(old.release());  // its locks may be held by threads that are gone
  }

  int visit(ForeignVisitor visitor) const { return outstanding_->visit(visitor); }
  void clear() {
    close();
    outstanding_ = std::make_shared<Outstanding>();
  }

  ~PyArrivals() { close(); }
  PyArrivals(const PyArrivals&) = delete;
  PyArrivals& operator=(const PyArrivals&) = delete;

 private:
  std::shared_ptr<Outstanding> outstanding_ = std::make_shared<Outstanding>();
  std::unique_ptr<Arrivals> arrivals_;
};

int traverse_arrivals(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  return nb::inst_ptr<PyArrivals>(self)->visit({reinterpret_cast<int (*)(void*, void*)>(visit), arg});
}

int clear_arrivals(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<PyArrivals>(self)->clear();
  return 0;
}

PyType_Slot arrivals_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_arrivals)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_arrivals)},
    {0, nullptr},
};

}  // namespace

void bind_arrivals(nb::module_& m) {
  nb::class_<PyArrivals>(m, "Arrivals", nb::type_slots(arrivals_slots))
      .def(nb::init<const nb::iterable&>(), nb::arg("futures"))
      .def("next", &PyArrivals::next, nb::arg("timeout").none())
      .def("close", &PyArrivals::close);
}

}  // namespace cudafuture::bind
