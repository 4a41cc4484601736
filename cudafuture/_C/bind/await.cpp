// `await future`: returns immediately if the future and its devices are done, and goes through the event loop
// otherwise.
#include "bind/errors.h"
#include "bind/future.h"

namespace cudafuture::bind {
namespace {

// An iterator that ends immediately with a value. It costs one small object; CPython's own machinery does the rest.
struct Done {
  PyObject_HEAD PyObject* value;
};

void done_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  Py_XDECREF(reinterpret_cast<Done*>(self)->value);
  type->tp_free(self);
  Py_DECREF(type);
}

PySendResult done_send(PyObject* self, PyObject*, PyObject** result) {
  auto* done = reinterpret_cast<Done*>(self);
  *result = done->value != nullptr ? std::exchange(done->value, nullptr) : Py_NewRef(Py_None);
  return PYGEN_RETURN;
}

PyObject* done_next(PyObject* self) {
  PyObject* value;
  done_send(self, nullptr, &value);
  // PyErr_SetObject would unpack a value that is a tuple or an exception.
  PyObject* stop = PyObject_CallOneArg(PyExc_StopIteration, value);
  Py_DECREF(value);
  if (stop != nullptr) {
    PyErr_SetObject(PyExc_StopIteration, stop);
    Py_DECREF(stop);
  }
  return nullptr;
}

PyType_Slot done_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(done_dealloc)},
    {Py_am_send, reinterpret_cast<void*>(done_send)},
    {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
    {Py_tp_iternext, reinterpret_cast<void*>(done_next)},
    {0, nullptr},
};
PyType_Spec done_spec = {"cudafuture._C._Done", sizeof(Done), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                         done_slots};
PyTypeObject* done_type = nullptr;

}  // namespace

PyObject* await_slot(PyObject* self) noexcept {
  const ParkingScope parking;
  try {
    Future& future = expect_future(self, "await");
    if (future.state() == State::completed && future.events().empty() && future.late_error() == nullptr) {
      Done* done = PyObject_New(Done, done_type);
      if (done == nullptr) return nullptr;
      future.observe();
      done->value = result_of(future).release().ptr();
      return reinterpret_cast<PyObject*>(done);
    }
    static Imported through_loop{"cudafuture._await", "through_loop"};
    return call(through_loop(), nb::handle(self)).release().ptr();
  } catch (nb::python_error& e) {
    e.restore();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

void bind_await(nb::module_&) { done_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&done_spec)); }

}  // namespace cudafuture::bind
