// Multipart writes of cudafuture.store.
#include "store/multipart_write.h"

#include <ATen/core/Tensor.h>
#include <nanobind/stl/shared_ptr.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bind/future.h"
#include "bind/io.h"
#include "bind/store.h"
#include "bind/tensors.h"
#include "core/process.h"
#include "io/aligned.h"

namespace cudafuture::bind {
namespace {

using store::Call;
using store::CallPtr;
using store::MultipartWrite;

// The Python handle of a multipart write, which is aborted when Python drops the handle.
struct MultipartHandle {
  std::shared_ptr<MultipartWrite> write;
  int priority;

  MultipartHandle(std::shared_ptr<MultipartWrite> write, int priority) : write(std::move(write)), priority(priority) {}
  MultipartHandle(MultipartHandle&&) = default;
  ~MultipartHandle() {
    if (write != nullptr) write->abort();
  }
};

io::Shape shape_from(nb::handle dtype, nb::handle sizes) {
  if (!THPDtype_Check(dtype.ptr())) {
    throw nb::type_error(("dtype is a torch.dtype, not " + repr_of(dtype)).c_str());
  }
  io::Shape shape;
  shape.dtype = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  if (c10::isQIntType(shape.dtype)) {
    throw nb::type_error("a quantized tensor has a scale, which the store does not keep");
  }
  for (nb::handle size : sizes) {
    if (!nb::try_cast(size, shape.sizes.emplace_back()) || shape.sizes.back() < 0) {
      throw nb::value_error(("a shape consists of sizes of at least 0, not " + repr_of(size)).c_str());
    }
  }
  if (shape.sizes.size() > store::kMostDims) {
    throw nb::value_error("a tensor of a store has 1024 dimensions at most");
  }
  return shape;
}

std::optional<std::uint64_t> digest_from(nb::handle object) {
  if (object.is_none()) return std::nullopt;
  std::uint64_t digest = 0;
  if (nb::try_cast(object, digest)) return digest;
  throw nb::value_error(("a digest is a number of 64 bits, not " + repr_of(object)).c_str());
}

MultipartHandle begin_write(const StorePtr& self, nb::handle key, nb::handle dtype, nb::handle sizes, int priority) {
  const ParkingScope parking;
  refuse_after_fork();
  const std::string name = key_of(key);
  const io::Shape shape = shape_from(dtype, sizes);
  const std::optional<std::uint64_t> bytes = io::bytes_of(shape);
  if (!bytes) throw nb::value_error("the tensor has more bytes than the largest file");
  expect_priority(priority);
  const WithoutGil released;
  return {MultipartWrite::begin(self, name, shape, *bytes), priority};
}

// Returns the offset of a part. Throws ValueError unless the part lies in the tensor and consists of whole leaves.
std::uint64_t expect_part(nb::handle at, std::uint64_t bytes, const MultipartWrite& write) {
  std::uint64_t begin = 0;
  if (nb::try_cast(at, begin) && write.has_part(begin, bytes)) return begin;
  throw nb::value_error(write.not_a_part(repr_of(at), bytes).c_str());
}

nb::object put(const MultipartHandle& self, nb::handle at, nb::handle tensor, nb::handle digest) {
  const ParkingScope parking;
  refuse_after_fork();
  const at::Tensor bytes = take_on_host(tensor);
  const std::uint64_t begin = expect_part(at, bytes.nbytes(), *self.write);
  const std::optional<std::uint64_t> expected = digest_from(digest);
  wait_for_room(self.write->engine());
  const CallPtr call = new_call(Call::Kind::write, "put a part of " + self.write->key(), self.priority);
  io::Memory memory;
  if (bytes.nbytes() != 0) memory.add(const_cast<void*>(bytes.const_data_ptr()), bytes.nbytes());
  call->keep = foreign(nb::steal(THPVariable_Wrap(bytes.detach())));
  nb::object result = wrap(call->future);
  bool is_new = false;
  {
    const WithoutGil released;
    is_new = self.write->put(begin, std::move(memory), expected, call);
  }
  if (is_new) return result;
  throw nb::value_error(MultipartWrite::put_before(begin, bytes.nbytes()).c_str());
}

nb::object commit(const MultipartHandle& self, nb::handle digest) {
  const ParkingScope parking;
  refuse_after_fork();
  const std::optional<std::uint64_t> expected = digest_from(digest);
  const CallPtr call = new_call(Call::Kind::write, "commit the write of " + self.write->key(), self.priority);
  nb::object result = wrap(call->future);
  {
    const WithoutGil released;
    self.write->commit(expected, call);
  }
  return result;
}

}  // namespace

void bind_multipart_write(nb::module_& m, nb::class_<store::Store>& store) {
  nb::class_<MultipartHandle>(m, "MultipartWrite")
      .def("put", put, nb::arg("at"), nb::arg("tensor"), nb::arg("digest").none())
      .def("commit", commit, nb::arg("digest").none())
      .def("abort", [](const MultipartHandle& self) { self.write->abort(); })
      .def_prop_ro("nbytes", [](const MultipartHandle& self) { return self.write->size(); });
  store.def("begin_write", begin_write, nb::arg("key"), nb::arg("dtype"), nb::arg("shape"), nb::arg("priority"));
}

}  // namespace cudafuture::bind
