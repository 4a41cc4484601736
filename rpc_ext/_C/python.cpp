#include "python.h"

namespace rpc_ext {
namespace {

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// Python's state of a thread that is not Python's own: one more reference than Gil has, until the thread ends.
class KeptThreadState {
 public:
  void keep() {
    if (!PyGILState_GetThisThreadState()) {
      state_ = PyGILState_Ensure();
      saved_ = PyEval_SaveThread();
    }
  }

  ~KeptThreadState() {
    if (!saved_ || is_finalizing()) return;
    PyEval_RestoreThread(saved_);
    PyGILState_Release(state_);
  }

 private:
  PyGILState_STATE state_{};
  PyThreadState* saved_ = nullptr;
};

}  // namespace

Gil::Gil() : taken_(!is_finalizing()) {
  if (!taken_) return;
  thread_local KeptThreadState thread;
  thread.keep();
  state_ = PyGILState_Ensure();
}

Gil::~Gil() {
  if (taken_) PyGILState_Release(state_);
}

void Held::drop() {
  if (!object_) return;
  if (const Gil gil; gil) Py_DECREF(object_);
  object_ = nullptr;
}

}  // namespace rpc_ext
