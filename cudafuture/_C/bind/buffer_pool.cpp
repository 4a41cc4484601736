// Buffer pools of cudafuture.io.
#include "io/buffer_pool.h"

#include <nanobind/stl/shared_ptr.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "bind/future.h"
#include "bind/tensors.h"
#include "core/callback_thread.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

using io::BufferPool;

// Requests `size` bytes. The future's value is `buffer`; its `loan` is filled by then.
nb::object take_buffer(BufferPool& self, std::uint64_t size, nb::object buffer, std::shared_ptr<BufferPool::Loan> loan,
                       const std::string& name) {
  const ParkingScope parking;
  refuse_after_fork();
  auto future = c10::make_intrusive<Future>();
  future->set_name(name);
  future->set_default_executor(&CallbackThread::get());
  nb::object result = wrap(future);
  self.take({size, std::move(loan), foreign(std::move(buffer)), std::move(future)});
  return result;
}

// Returns a capsule of an allocator that lends the pool's memory, and keeps the pool alive.
nb::capsule allocator(std::shared_ptr<BufferPool> self) {
  auto made = std::make_unique<io::BufferPoolAllocator>(std::move(self));
  c10::Allocator* const base = made.get();
  nb::capsule capsule(base, "c10::Allocator", [](void* p) noexcept { delete static_cast<c10::Allocator*>(p); });
  made.release();
  return capsule;
}

}  // namespace

void bind_buffer_pool(nb::module_& m) {
  nb::class_<BufferPool::Loan>(m, "BufferLoan")
      .def_prop_ro("tensor",
                   [](const BufferPool::Loan& self) -> nb::object {
                     if (!self.tensor.defined()) return nb::none();
                     return nb::steal(THPVariable_Wrap(self.tensor));
                   })
      .def("release", [](BufferPool::Loan& self) {
        const at::Tensor last = std::move(self.tensor);  // the loan is empty before the memory returns
        self.tensor = at::Tensor();
      });
  nb::class_<BufferPool>(m, "BufferPool")
      .def("take", take_buffer, nb::arg("size"), nb::arg("buffer"), nb::arg("loan"), nb::arg("name"))
      .def("allocator", allocator)
      .def_prop_ro("free", &BufferPool::free)
      .def_prop_ro("outside", &BufferPool::outside)
      .def("close", [](BufferPool& self) {
        const ParkingScope parking;
        self.close();
      });
  m.def("make_buffer_loan", [] { return std::make_shared<BufferPool::Loan>(); });
  // A shared pointer, because parts of the memory keep the pool alive.
  m.def(
      "make_buffer_pool",
      [](nb::handle arena, bool is_pinned) { return std::make_shared<BufferPool>(take_on_host(arena), is_pinned); },
      nb::arg("arena"), nb::arg("is_pinned"));
}

}  // namespace cudafuture::bind
