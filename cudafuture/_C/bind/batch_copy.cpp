// Copies of the tensors of a batch to a device.
#include "core/batch_copy.h"

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/errors.h"
#include "bind/future.h"
#include "core/process.h"
#include "core/stream_pool.h"

namespace cudafuture::bind {
namespace {

// Returns true for tensors whose copy is their bytes, so that they can lie in a slab. A class derived from torch's can
// carry more than its memory.
bool is_packable(nb::handle object) {
  static Imported parameter{"torch.nn", "Parameter"};
  static Imported buffer{"torch.nn", "Buffer"};
  if (!THPVariable_Check(object.ptr())) return false;
  if (!THPVariable_CheckExact(object.ptr()) && !object.type().is(parameter()) && !object.type().is(buffer()))
    return false;
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized() &&
         !tensor.is_nested() && !tensor._is_zerotensor();
}

nb::list packable(nb::handle leaves) {
  nb::list indices;
  std::size_t index = 0;
  for (nb::handle leaf : leaves) {
    if (is_packable(leaf)) indices.append(index);
    ++index;
  }
  return indices;
}

std::vector<at::Tensor> host_tensors(nb::handle tensors) {
  std::vector<at::Tensor> all;
  for (nb::handle object : tensors) {
    if (!is_packable(object)) {
      throw nb::type_error(("expected a strided tensor on the host, not " + repr_of(object.type())).c_str());
    }
    all.push_back(THPVariable_Unpack(object.ptr()));
  }
  return all;
}

nb::list copy_batch_of(nb::handle tensors, nb::handle stream, std::optional<DeviceSlab*> slab, bool pack, bool pin,
                       bool may_drop_unordered) {
  const ParkingScope parking;
  refuse_after_fork();
  const std::vector<c10::Stream> streams = streams_from(stream);
  const std::vector<at::Tensor> sources = host_tensors(tensors);
  std::vector<at::Tensor> copies;
  {
    const WithoutGil released;
    copies = copy_batch(sources, streams.at(0), slab.value_or(nullptr), {pack, pin, may_drop_unordered});
  }
  nb::list result;
  for (at::Tensor& copied : copies) result.append(nb::steal(THPVariable_Wrap(std::move(copied))));
  return result;
}

}  // namespace

void bind_batch_copy(nb::module_& m) {
  nb::class_<DeviceSlab>(m, "DeviceSlab")
      .def(
          "__init__",
          [](DeviceSlab* self, std::size_t nbytes, nb::handle device) {
            const ParkingScope parking;
            const c10::Device at = device_from(device);
            const WithoutGil released;
            new (self) DeviceSlab(nbytes, at);
          },
          nb::arg("nbytes"), nb::arg("device"))
      .def_static(
          "of", [](nb::handle memory) { return DeviceSlab(tensor_from(memory)); }, nb::arg("memory"))
      .def_prop_ro("nbytes", &DeviceSlab::nbytes);
  m.def("copy_batch", copy_batch_of, nb::arg("tensors"), nb::arg("stream"), nb::arg("slab").none(), nb::arg("pack"),
        nb::arg("pin"), nb::arg("may_drop_unordered"));
  m.def("packable", packable, nb::arg("leaves"));
  m.def(
      "batch_nbytes", [](nb::handle tensors) { return BatchLayout(host_tensors(tensors), true).nbytes; },
      nb::arg("tensors"));
}

}  // namespace cudafuture::bind
