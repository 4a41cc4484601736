// How pybind11 holds objects of torch that other threads use, too.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace cudafuture::c10d_backend {

// An intrusive_ptr that is dropped without the GIL: a destructor may wait for a thread that needs it. torch holds its
// Works and backends in a class of its own with this layout, and pybind11 reads both alike.
template <class T>
class Holder {
 public:
  Holder() = default;
  explicit Holder(T* object) : pointer_(c10::intrusive_ptr<T>::unsafe_steal_from_new(object)) {}
  Holder(c10::intrusive_ptr<T> pointer) : pointer_(std::move(pointer)) {}  // NOLINT: as pybind11 converts
  Holder(const Holder&) = default;
  Holder(Holder&&) = default;
  Holder& operator=(const Holder&) = default;
  Holder& operator=(Holder&&) = default;
  ~Holder() {
    if (!pointer_.defined()) return;
    if (PyGILState_Check() != 0) {
      const pybind11::gil_scoped_release released;
      pointer_.reset();
    } else {
      pointer_.reset();
    }
  }

  T* get() const noexcept { return pointer_.get(); }
  T& operator*() const noexcept { return *pointer_; }
  T* operator->() const noexcept { return pointer_.get(); }
  operator c10::intrusive_ptr<T>() const noexcept { return pointer_; }  // NOLINT: as pybind11 converts

 private:
  c10::intrusive_ptr<T> pointer_;
};

}  // namespace cudafuture::c10d_backend

PYBIND11_DECLARE_HOLDER_TYPE(T, cudafuture::c10d_backend::Holder<T>, true)
