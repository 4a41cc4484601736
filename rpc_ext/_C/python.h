#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace rpc_ext {

namespace py = pybind11;

// Takes the GIL. An agent's thread keeps what Python has to know of it until it ends, rather than making that anew each
// time; false where Python is going away and nobody may enter it any more.
class Gil {
 public:
  Gil();
  ~Gil();
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;
  explicit operator bool() const { return taken_; }

 private:
  const bool taken_;
  PyGILState_STATE state_{};
};

// A Python object that C++ threads hold without the GIL. Leaked where Python is going away.
class Held {
 public:
  explicit Held(py::object object) : object_(object.release().ptr()) {}
  ~Held() { drop(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  PyObject* get() const { return object_; }
  void drop();

 private:
  PyObject* object_;
};

}  // namespace rpc_ext
