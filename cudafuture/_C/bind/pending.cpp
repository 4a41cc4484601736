#include "bind/pending.h"

#include <pythread.h>

#include <vector>

#include "bind/future.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

BlockedThread* first_blocked = nullptr;

// Adds an object that is a future to a vector. Under the lock of another future nothing is called.
int add_future(void* object, void* found) {
  auto* const one = static_cast<PyObject*>(object);
  if (one != nullptr && core_of_or_null(one) != nullptr) {
    static_cast<std::vector<PyObject*>*>(found)->push_back(Py_NewRef(one));
  }
  return 0;
}

nb::list as_list(const std::vector<PyObject*>& found) {
  nb::list list;
  for (PyObject* one : found) list.append(nb::steal(one));
  return list;
}

// Returns the futures that wait for `future`: its children, and the combinations that it is a part of.
nb::list dependents(nb::handle future) {
  std::vector<PyObject*> found;
  expect_future(future, "dependents").visit_continuations({add_future, &found});
  return as_list(found);
}

// Returns the parts of a pending combination, in their order.
nb::list parts(nb::handle future) {
  std::vector<PyObject*> found;
  expect_future(future, "parts").visit_parts({add_future, &found});
  return as_list(found);
}

}  // namespace

BlockedThread::BlockedThread(Future& future) noexcept
    : future_(future), thread_(PyThread_get_thread_ident()), next_(first_blocked), link_(&first_blocked) {
  if (next_ != nullptr) next_->link_ = &next_;
  first_blocked = this;
}

BlockedThread::~BlockedThread() {
  *link_ = next_;
  if (next_ != nullptr) next_->link_ = link_;
}

void bind_pending(nb::module_& m) {
  m.def("dependents", dependents, nb::arg("future"));
  m.def("parts", parts, nb::arg("future"));
  m.def("blocked_threads", [] {
    nb::list list;
    if (is_forked_child()) return list;  // its threads are the parent's
    for (const BlockedThread* one = first_blocked; one != nullptr; one = one->next_) {
      list.append(nb::make_tuple(one->thread_, wrap(FuturePtr::reclaim_copy(&one->future_))));
    }
    return list;
  });
}

}  // namespace cudafuture::bind
