// Conversions of devices, streams and tensors from Python.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>

#include "bind/errors.h"
#include "bind/future.h"
#include "core/stream_pool.h"

namespace cudafuture::bind {
namespace {

constexpr int kMaxNativeDepth = 64;

// Adds an index to a device that was named by its type alone.
c10::Device with_index(c10::Device device) {
  if (device.has_index() || !has_streams(device)) return device;
  return c10::Device(device.type(), c10::impl::VirtualGuardImpl(device.type()).getDevice().index());
}

c10::Stream stream_from(nb::handle object) {
  static Imported stream_class{"torch", "Stream"};
  if (!nb::isinstance(object, stream_class())) {
    const std::string message = "a stream is a torch.Stream, not " + repr_of(object);
    throw nb::type_error(message.c_str());
  }
  return c10::Stream::unpack3(nb::cast<std::int64_t>(object.attr("stream_id")),
                              static_cast<c10::DeviceIndex>(nb::cast<int>(object.attr("device_index"))),
                              static_cast<c10::DeviceType>(nb::cast<int>(object.attr("device_type"))));
}

bool is_plain_data(PyObject* o) noexcept {
  return o == Py_None || PyLong_CheckExact(o) || PyBool_Check(o) || PyFloat_CheckExact(o) || PyUnicode_CheckExact(o) ||
         PyBytes_CheckExact(o) || PyComplex_CheckExact(o);
}

// Visits the tensors in lists, tuples and dicts without leaving C++, and lists the objects that only Python can search.
// Runs no Python code.
template <class Show>
class Walk {
 public:
  Walk(PyObject* value, Show& show) : show_(show) { visit(value, 0); }

  std::vector<PyObject*> objects;  // borrowed: take references before Python runs

 private:
  void visit(PyObject* o, int depth) {
    if (is_plain_data(o)) return;
    if (THPVariable_CheckExact(o)) {
      const at::Tensor& tensor = THPVariable_Unpack(o);
      if (tensor.layout() != at::kStrided) {
        objects.push_back(o);
      } else {
        show_(tensor);
      }
    } else if (PyList_CheckExact(o) || PyTuple_CheckExact(o)) {
      if (!enter(o, depth)) return;
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); ++i) visit(PySequence_Fast_GET_ITEM(o, i), depth + 1);
    } else if (PyDict_CheckExact(o)) {
      if (!enter(o, depth)) return;
      Py_ssize_t position = 0;
      PyObject* key;
      PyObject* value;
      while (PyDict_Next(o, &position, &key, &value) != 0) {
        visit(key, depth + 1);
        visit(value, depth + 1);
      }
    } else if (core_of_or_null(o) == nullptr) {  // a future has its own events
      objects.push_back(o);
    }
  }

  // Returns false for a container that was visited before. A container with one reference cannot be met twice. The
  // first ones with more are not noted: common values have few, and noting them allocates.
  bool enter(PyObject* o, int depth) {
    constexpr int kUnnoted = 16;
    if (depth == kMaxNativeDepth) {
      objects.push_back(o);
      return false;
    }
    if (Py_REFCNT(o) == 1 || ++shared_ <= kUnnoted) return true;
    if (seen_ == nullptr) seen_ = std::make_unique<std::unordered_set<PyObject*>>();
    return seen_->insert(o).second;
  }

  Show& show_;
  int shared_ = 0;
  std::unique_ptr<std::unordered_set<PyObject*>> seen_;
};

// Collects the devices that have streams, in the order of their appearance.
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

// Collects the tensors, or their memory, on devices that have streams.
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

void add_item(std::vector<DeviceMemory>& items, c10::Device device, c10::Storage storage) {
  items.emplace_back(device, std::move(storage));
}

// Adds a tensor that represents its memory.
void add_item(std::vector<at::Tensor>& items, c10::Device, c10::Storage storage) {
  items.push_back(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(),
                                                           caffe2::TypeMeta::Make<std::uint8_t>()));
}

// The result of a search through Python objects, kept with the value because the search is slow. The references are
// weak. A freed storage belonged to a tensor that has been replaced or dropped since; the value is then searched again.
class KeptSearch final : public torch::CustomClassHolder {
 public:
  KeptSearch(std::vector<PyObject*> objects, const std::vector<at::Tensor>& tensors, bool may_stop)
      : may_stop(may_stop), objects_(std::move(objects)) {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.has_storage()) continue;
      uses_.emplace_back(tensor.device(), tensor.storage().getWeakStorageImpl());
    }
  }

  // Adds the result. False if it is not valid for these objects any more.
  template <class Item>
  bool add_to(std::vector<Item>& items, const std::vector<PyObject*>& objects) const {
    if (objects != objects_) return false;
    const std::size_t before = items.size();
    for (const auto& [device, weak] : uses_) {
      auto storage = weak.lock();
      if (!storage) {
        items.erase(items.begin() + static_cast<std::ptrdiff_t>(before), items.end());
        return false;
      }
      add_item(items, device, c10::Storage(std::move(storage)));
    }
    return true;
  }

  // Adds the result of another search, for a list of both values.
  void append(const KeptSearch& other) {
    may_stop |= other.may_stop;
    objects_.insert(objects_.end(), other.objects_.begin(), other.objects_.end());
    uses_.insert(uses_.end(), other.uses_.begin(), other.uses_.end());
  }

  bool may_stop = false;

  KeptSearch() = default;

 private:
  std::vector<PyObject*> objects_;  // addresses, compared and never dereferenced
  std::vector<std::pair<c10::Device, c10::weak_intrusive_ptr<c10::StorageImpl>>> uses_;
};

c10::intrusive_ptr<KeptSearch> kept_search(const Value& value) {
  if (value.form == Value::Form::native || !value.native.isCapsule()) return {};
  return c10::dynamic_intrusive_pointer_cast<KeptSearch>(value.native.toCapsule());
}

// Searches parts of the value in Python for tensors on devices with streams.
std::vector<at::Tensor> search_in_python(const std::vector<PyObject*>& parts, nb::handle value, bool may_stop) {
  std::vector<nb::object> owned;
  for (PyObject* part : parts) owned.push_back(nb::borrow(nb::handle(part)));
  nb::list objects;
  for (const nb::object& part : owned) objects.append(part);
  static Imported search{"cudafuture._tensors", "search_objects"};
  ItemList<at::Tensor> list;
  for (nb::handle tensor : call(search(), objects, value, nb::bool_(may_stop))) list(THPVariable_Unpack(tensor.ptr()));
  return std::move(list.found);
}

// Walks containers each time, to see their changes. Searches objects once.
template <class Item>
std::vector<Item> items_in_value(Future& future) {
  const nb::object object = result_of(future);
  if (!may_use_devices(object)) return {};
  ItemList<Item> list;
  Walk walk(object.ptr(), list);
  if (walk.objects.empty()) return std::move(list.found);
  const auto kept = kept_search(future.value());
  if (kept != nullptr && kept->add_to(list.found, walk.objects)) return std::move(list.found);
  const bool may_stop = kept != nullptr ? kept->may_stop : !future.named_tensors().empty();
  const std::vector<at::Tensor> tensors = search_in_python(walk.objects, object, may_stop);
  for (const at::Tensor& tensor : tensors) list(tensor);
  Value& value = future.value();
  if (value.form == Value::Form::object) {
    value.native =
        c10::IValue::make_capsule(c10::make_intrusive<KeptSearch>(std::move(walk.objects), tensors, may_stop));
  }
  return std::move(list.found);
}

template <class Item>
std::vector<Item> items_of(Future& future) {
  std::vector<Item> items;
  if (!future.events().empty() && future.state() == State::completed) items = items_in_value<Item>(future);
  if (!stands(SyncEdge::result_tensors)) return items;
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
    const std::string message = "a device is a torch.device, a str such as 'cuda:0' or an int, not " + repr_of(object);
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
  const std::string message = "tensors= names torch.Tensors, not " + repr_of(object);
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

bool may_use_devices(nb::handle value) { return !is_plain_data(value.ptr()) && any_device_with_streams(); }

FoundTensors find_tensors(nb::handle value, bool may_stop) {
  if (!may_use_devices(value)) return {};
  DeviceList list;
  Walk walk(value.ptr(), list);
  if (walk.objects.empty()) return {std::move(list.found), {}};
  const std::vector<at::Tensor> tensors = search_in_python(walk.objects, value, may_stop);
  for (const at::Tensor& tensor : tensors) list(tensor);
  auto kept = c10::make_intrusive<KeptSearch>(std::move(walk.objects), tensors, may_stop);
  return {std::move(list.found), c10::IValue::make_capsule(std::move(kept))};
}

c10::IValue searches_of(c10::ArrayRef<PyObject*> parts) {
  auto all = c10::make_intrusive<KeptSearch>();
  bool any = false;
  for (PyObject* part : parts) {
    const auto kept = kept_search(core_of(part).value());
    if (kept == nullptr) continue;
    all->append(*kept);
    any = true;
  }
  return any ? c10::IValue::make_capsule(std::move(all)) : c10::IValue();
}

std::vector<at::Tensor> tensors_of(Future& future) { return items_of<at::Tensor>(future); }
std::vector<DeviceMemory> memory_of(Future& future) {
  if (future.lifetime() == Lifetime::hold) return {};  // no stream is recorded
  return items_of<DeviceMemory>(future);
}

}  // namespace cudafuture::bind
