// Waits for the first of several futures, for Python: wait() and as_completed().
#include "core/arrivals.h"

#include <memory>
#include <utility>
#include <vector>

#include "bind/future.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

// Keeps the futures' Python objects, and shows them to the cyclic collector.
class PyArrivals {
 public:
  explicit PyArrivals(nb::tuple futures) : futures_(std::move(futures)) {
    std::vector<Future*> cores;
    for (nb::handle future : futures_) cores.push_back(&expect_future(future, "waiting"));
    arrivals_ = std::make_unique<Arrivals>(std::move(cores));
  }

  // Returns the next future that is done; None after the timeout, or after close().
  nb::object next(nb::handle timeout) {
    const ParkingScope parking;
    refuse_after_fork();
    const Deadline deadline = deadline_in(timeout);
    while (arrivals_ != nullptr) {
      std::size_t position = 0;
      if (arrivals_->take(position)) {
        join_host_time(core_of(futures_[position]).completed_at());
        return futures_[position];
      }
      const FuturePtr signal = arrivals_->next();
      if (!try_wait_until_done(*signal, deadline)) break;
    }
    return nb::none();
  }

  void close() noexcept {
    std::unique_ptr<Arrivals> old = std::move(arrivals_);
    if (is_forked_child()) static_cast<void>(old.release());  // its locks may be held by threads that are gone
  }

  int visit(visitproc visit, void* arg) const { return futures_.is_valid() ? visit(futures_.ptr(), arg) : 0; }
  void clear() {
    close();
    futures_ = nb::steal<nb::tuple>(PyTuple_New(0));
  }

  ~PyArrivals() { close(); }
  PyArrivals(const PyArrivals&) = delete;
  PyArrivals& operator=(const PyArrivals&) = delete;

 private:
  nb::tuple futures_;
  std::unique_ptr<Arrivals> arrivals_;
};

int traverse_arrivals(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<PyArrivals>(self)->visit(visit, arg) : 0;
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
      .def(nb::init<nb::tuple>(), nb::arg("futures"))
      .def("next", &PyArrivals::next, nb::arg("timeout").none())
      .def("close", &PyArrivals::close);
}

}  // namespace cudafuture::bind
