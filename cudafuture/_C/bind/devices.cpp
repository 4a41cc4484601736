// Devices, streams and tensors, as Python hands them over.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string>

#include "bind/errors.h"
#include "bind/future.h"
#include "core/stream_pool.h"

namespace cudafuture::bind {
namespace {

constexpr int kMaxNativeDepth = 8;

// An index for a device that was named by its type alone.
c10::Device with_index(c10::Device device) {
  if (device.has_index() || !has_streams(device)) return device;
  return c10::Device(device.type(), c10::impl::VirtualGuardImpl(device.type()).getDevice().index());
}

c10::Stream stream_from(nb::handle object) {
  static Imported stream_class{"torch", "Stream"};
  if (!nb::isinstance(object, stream_class())) {
    const std::string message = "a stream is a torch.Stream, not " + std::string(nb::repr(object).c_str());
    throw nb::type_error(message.c_str());
  }
  return c10::Stream::unpack3(nb::cast<std::int64_t>(object.attr("stream_id")),
                              static_cast<c10::DeviceIndex>(nb::cast<int>(object.attr("device_index"))),
                              static_cast<c10::DeviceType>(nb::cast<int>(object.attr("device_type"))));
}

bool is_plain_data(PyObject* o) noexcept {
  return o == Py_None || PyLong_CheckExact(o) || PyBool_Check(o) || PyFloat_CheckExact(o) || PyUnicode_CheckExact(o) ||
         PyBytes_CheckExact(o);
}

// Shows the tensors of the commonest shapes without leaving C++. False when the value holds something else.
template <class Show>
bool show_natively(PyObject* o, Show& show, int depth) {
  if (is_plain_data(o)) return true;
  if (depth == 0) return false;
  if (THPVariable_CheckExact(o)) {
    const at::Tensor& tensor = THPVariable_Unpack(o);
    if (tensor.layout() != at::kStrided) return false;
    show(tensor);
    return true;
  }
  if (PyList_CheckExact(o) || PyTuple_CheckExact(o)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i) {
      if (!show_natively(PySequence_Fast_GET_ITEM(o, i), show, depth - 1)) return false;
    }
    return true;
  }
  if (PyDict_CheckExact(o)) {
    Py_ssize_t position = 0;
    PyObject* key;
    PyObject* value;
    while (PyDict_Next(o, &position, &key, &value) != 0) {
      if (!is_plain_data(key) || !show_natively(value, show, depth - 1)) return false;
    }
    return true;
  }
  return false;
}

// Notes the devices that have streams, in the order in which they come.
class DeviceList {
 public:
  void operator()(const at::Tensor& tensor) {
    const c10::Device device = tensor.device();
    if (device == last_) return;
    last_ = device;
    if (has_streams(device) && std::find(found.begin(), found.end(), device) == found.end()) found.push_back(device);
  }
  std::vector<c10::Device> found;

 private:
  c10::Device last_{c10::DeviceType::CPU};
};

// Notes what lives on devices that have streams: tensors, or their memory.
template <class Item>
class ItemList {
 public:
  void operator()(const at::Tensor& tensor) {
    const c10::Device device = tensor.device();
    if (device != last_) {
      last_ = device;
      has_streams_ = has_streams(device);
    }
    if (has_streams_) found.push_back(tensor);
  }
  std::vector<Item> found;

 private:
  c10::Device last_{c10::DeviceType::CPU};
  bool has_streams_ = false;
};

template <class List>
auto found_in(nb::handle value) {
  List list;
  if (is_plain_data(value.ptr()) || !any_device_with_streams()) return std::move(list.found);
  if (show_natively(value.ptr(), list, kMaxNativeDepth)) return std::move(list.found);
  list = {};
  static Imported find{"cudafuture._tensors", "find_tensors"};
  for (nb::handle tensor : call(find(), value)) list(THPVariable_Unpack(tensor.ptr()));
  return std::move(list.found);
}

template <class Item>
std::vector<Item> items_of(Future& future) {
  std::vector<Item> items;
  if (!future.events().empty() && future.state() == State::completed)
    items = found_in<ItemList<Item>>(result_of(future));
  if (!stands(Edge::result_tensors)) return items;
  const std::vector<at::Tensor>& named = future.named_tensors();
  items.insert(items.end(), named.begin(), named.end());
  return items;
}

}  // namespace

int expect_priority(int priority) {
  if (priority <= 0) return priority;
  const std::string message = "priority is 0 (the default) or negative (more urgent, as -1), not " +
                              std::to_string(priority) + ": lower is more urgent, and stream pools have none above 0";
  throw nb::value_error(message.c_str());
}

std::vector<c10::Device> devices_from(nb::handle devices) {
  std::vector<c10::Device> result;
  if (nb::isinstance<nb::str>(devices)) {
    throw nb::type_error("devices is a list of devices, as in devices=['cuda:0'], not one str");
  }
  for (nb::handle item : nb::iter(devices)) {
    const c10::Device device = device_from(item);
    if (device.is_cpu()) continue;  // always allowed, and never asynchronous
    if (!result.empty() && result.front().type() != device.type()) {
      raise_error("DeviceMismatchError",
                  "a future's devices are all of one type (and the CPU, which is always allowed), but " +
                      result.front().str() + " and " + device.str() +
                      " were given; use one future for each type and gather() them");
    }
    result.push_back(device);
  }
  return result;
}

std::vector<c10::Stream> streams_from(nb::handle streams) {
  std::vector<c10::Stream> result;
  if (streams.is_none()) return result;
  if (PySequence_Check(streams.ptr()) != 0) {
    for (nb::handle item : nb::iter(streams)) result.push_back(stream_from(item));
  } else {
    result.push_back(stream_from(streams));
  }
  return result;
}

c10::Device device_from(nb::handle object) {
  static Imported device_class{"torch", "device"};
  if (THPDevice_Check(object.ptr())) return with_index(reinterpret_cast<THPDevice*>(object.ptr())->device);
  if (!nb::isinstance<nb::str>(object) && !nb::isinstance<nb::int_>(object)) {
    const std::string message =
        "a device is a torch.device, a str such as 'cuda:0' or an int, not " + std::string(nb::repr(object).c_str());
    throw nb::type_error(message.c_str());
  }
  const nb::object made = device_class()(object);
  return with_index(reinterpret_cast<THPDevice*>(made.ptr())->device);
}

nb::object device_object(c10::Device device) { return nb::steal(THPDevice_New(device)); }

nb::object stream_object(const c10::Stream& stream) {
  static Imported stream_class{"torch", "Stream"};
  const c10::StreamData3 data = stream.pack3();
  return stream_class()(nb::arg("stream_id") = data.stream_id,
                        nb::arg("device_index") = static_cast<int>(data.device_index),
                        nb::arg("device_type") = static_cast<int>(data.device_type));
}

std::vector<c10::Device> devices_of_streams(const std::vector<c10::Stream>& streams) {
  std::vector<c10::Device> devices;
  for (const c10::Stream& stream : streams) devices.push_back(stream.device());
  return devices;
}

at::Tensor tensor_from(nb::handle object) {
  if (THPVariable_Check(object.ptr())) return THPVariable_Unpack(object.ptr());
  const std::string message = "tensors= names torch.Tensors, not " + std::string(nb::repr(object).c_str());
  throw nb::type_error(message.c_str());
}

std::string device_set(c10::ArrayRef<c10::Device> devices) {
  std::string text = "{";
  for (c10::Device device : devices) {
    if (text.size() > 1) text += ", ";
    text += device.str();
  }
  return text + "}";
}

std::vector<c10::Device> devices_in(nb::handle value) { return found_in<DeviceList>(value); }
std::vector<at::Tensor> tensors_of(Future& future) { return items_of<at::Tensor>(future); }
std::vector<DeviceMemory> memory_of(Future& future) { return items_of<DeviceMemory>(future); }

}  // namespace cudafuture::bind
