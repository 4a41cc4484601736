// The module cudafuture._c10d. It exchanges objects with torch's own modules, so it uses the pybind11 of torch.
#include "backend.h"
#include "work.h"

PYBIND11_MODULE(_c10d, m) {
  pybind11::module_::import("torch._C._distributed_c10d");  // the classes that ours derive from
  pybind11::module_::import("cudafuture._C");               // the library that this one is linked to
  cudafuture::c10d_backend::bind_work(m);
  cudafuture::c10d_backend::bind_backend(m);
}
