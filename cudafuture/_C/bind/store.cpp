// Stores of cudafuture.store.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/errors.h"
#include "bind/future.h"
#include "bind/io.h"
#include "bind/store.h"
#include "bind/tensors.h"
#include "core/error.h"
#include "core/process.h"
#include "io/aligned.h"
#include "io/checksum.h"
#include "io/failure.h"
#include "store/mapping.h"
#include "store/store.h"

namespace cudafuture::bind {

using store::Call;
using store::CallPtr;

std::string key_of(nb::handle object) {
  if (!PyUnicode_Check(object.ptr())) {
    throw nb::type_error(("a key is a str, not " + repr_of(object)).c_str());
  }
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();
    throw nb::value_error(("the key " + repr_of(object) + " is not UTF-8").c_str());
  }
  const std::string_view key(text, static_cast<std::size_t>(size));
  if (key.empty() || key.size() > store::kLongestKey) {
    throw nb::value_error(("a key has 1 to 1024 bytes of UTF-8, not " + std::to_string(key.size())).c_str());
  }
  if (key.find('\0') != std::string_view::npos) throw nb::value_error("a key has no NUL");
  return std::string(key);
}

Keys keys_of(nb::handle objects) {
  Keys keys;
  keys.reserve(nb::len(objects));
  for (nb::handle object : objects) keys.push_back(key_of(object));
  return keys;
}

CallPtr new_call(Call::Kind kind, const std::string& name, int priority) {
  auto call = std::make_shared<Call>();
  call->kind = kind;
  call->future = c10::make_intrusive<Future>(expect_priority(priority));
  call->future->set_name(name);
  if (kind == Call::Kind::write) call->future->promise_release();
  return call;
}

std::optional<at::Tensor> target_of(nb::object object, at::ScalarType dtype, std::size_t count, const char* what) {
  if (object.is_none()) return std::nullopt;
  at::Tensor tensor = take_on_host(object);
  const bool has_count = tensor.dim() == 1 && static_cast<std::size_t>(tensor.numel()) == count;
  if (tensor.scalar_type() == dtype && has_count) return tensor;
  const std::string wanted = std::string(what) + ": pass a tensor of " + c10::toString(dtype);
  throw nb::value_error((wanted + " with one dimension, and an element for each").c_str());
}

namespace {

using io::Direction;
using store::Store;

using Entries = std::vector<store::EntryPtr>;

CallPtr new_call_of(Call::Kind kind, const char* verb, const Keys& keys, int priority) {
  const std::string operand = keys.size() == 1 ? keys.front() : std::to_string(keys.size()) + " keys";
  return new_call(kind, std::string(verb) + " " + operand, priority);
}

io::Shape shape_of(nb::handle object) {
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  if (tensor.dim() > store::kMostDims) throw nb::value_error("a tensor of a store has 1024 dimensions at most");
  if (tensor.is_quantized()) throw nb::type_error("a quantized tensor has a scale, which the store does not keep");
  return {tensor.scalar_type(), {tensor.sizes().begin(), tensor.sizes().end()}};
}

// Returns the required checksum of each tensor's bytes, if any.
std::vector<std::optional<std::uint64_t>> digests_from(nb::object digests, const Keys& keys) {
  std::vector<std::optional<std::uint64_t>> found(keys.size());
  if (digests.is_none()) return found;
  if (nb::len(digests) != keys.size())
    throw nb::value_error(
        "the number of digests differs from the number of keys: give one digest, or None, for each key");
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!nb::try_cast(digests[i], found[i])) {
      const std::string what = repr_of(digests[i]);
      throw nb::value_error(("key '" + keys[i] + "': a digest is a number of 64 bits, not " + what).c_str());
    }
  }
  return found;
}

nb::object write(const StorePtr& self, nb::list keys, nb::list tensors, int priority, nb::object digests,
                 nb::object written, bool atomic) {
  const ParkingScope parking;
  refuse_after_fork();
  Keys names = keys_of(keys);
  if (names.size() != nb::len(tensors))
    throw nb::value_error("the number of tensors differs from the number of keys: give one tensor for each key");
  const std::vector<std::optional<std::uint64_t>> expected = digests_from(digests, names);
  const std::optional<at::Tensor> outcomes = target_of(written, at::kBool, names.size(), "written");
  wait_for_room(self->engine());
  const CallPtr call = new_call_of(Call::Kind::write, "write", names, priority);
  Tensors taken = take_tensors(tensors, Direction::write, priority);
  bool* const outcome = outcomes ? outcomes->mutable_data_ptr<bool>() : nullptr;
  std::fill_n(outcome, outcomes ? names.size() : 0, false);
  if (outcomes) taken.keep.append(nb::steal(THPVariable_Wrap(outcomes->detach())));
  store::WriteList writes;
  std::uint64_t size = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    size += taken.memory.front().size();
    writes.push_back({call, std::move(names[i]), shape_of(tensors[i]), std::move(taken.memory.front()), 0, expected[i],
                      outcome == nullptr ? nullptr : outcome + i});
    taken.memory.pop_front();
  }
  call->future->set_operation({&self->place(), kUnknown, static_cast<std::int64_t>(size)});
  if (atomic) call->atomic = std::make_shared<store::AtomicWrite>(writes.size());
  names = {};
  call->device = std::move(taken.device);
  call->keep = foreign(taken.kept());
  nb::object result = wrap(call->future);
  {
    const WithoutGil released;
    self->write(std::move(writes), call);
  }
  return result;
}

// Finds an entry; releases the GIL if the index is locked, as during a compaction.
store::EntryPtr find(const Store& store, const std::string& key) {
  store::EntryPtr found;
  if (store.try_find(key, found)) return found;
  const WithoutGil released;
  return store.find(key);
}

// Returns the entry of each key; returns none and fails the call if a key is missing.
std::optional<Entries> find(const Store& store, const Keys& keys, const CallPtr& call) {
  Entries entries;
  if (keys.size() == 1) {
    entries.push_back(find(store, keys.front()));
  } else {
    const WithoutGil released;
    entries = store.find(keys);
  }
  const auto missing = std::find(entries.begin(), entries.end(), nullptr);
  if (missing == entries.end()) return entries;
  const std::string& key = keys[static_cast<std::size_t>(missing - entries.begin())];
  call->future->fail(Value::of_error(std::make_exception_ptr(store.no_such_key(key))));
  return std::nullopt;
}

nb::list make_tensors(const Entries& entries, c10::Device device) {
  nb::list tensors;
  for (const store::EntryPtr& entry : entries) {
    at::Tensor tensor;
    {
      const WithoutGil released;
      tensor = device.is_cpu()
                   ? io::make_tensor_on_host(entry->shape)
                   : at::empty(entry->shape.sizes, at::TensorOptions().dtype(entry->shape.dtype).device(device));
    }
    tensors.append(nb::steal(THPVariable_Wrap(std::move(tensor))));
  }
  return tensors;
}

void expect_shapes(const Entries& entries, const Keys& keys, nb::list outs) {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const nb::handle out = outs[i];
    if (!THPVariable_Check(out.ptr())) continue;  // refused below
    const io::Shape shape = shape_of(out);
    if (shape == entries[i]->shape) continue;
    throw nb::value_error(("key '" + keys[i] + "' is " + differ(entries[i]->shape, shape)).c_str());
  }
}

nb::object read(const StorePtr& self, nb::list keys, nb::object outs, nb::object device, bool gives_list, int priority,
                nb::object digests) {
  const ParkingScope parking;
  refuse_after_fork();
  Keys names = keys_of(keys);
  if (self->is_closed()) throw Error(ErrorKind::invalid_state, "the store is closed");
  const std::optional<at::Tensor> told = target_of(digests, at::kUInt64, names.size(), "digests");
  wait_for_room(self->engine());
  const CallPtr call = new_call_of(Call::Kind::read, "read", names, priority);
  std::optional<Entries> entries = find(*self, names, call);
  if (!entries) return wrap(call->future);
  nb::list tensors;
  if (outs.is_none()) {
    tensors = make_tensors(*entries, device.is_none() ? c10::Device(c10::kCPU) : device_from(device));
  } else {
    tensors = nb::cast<nb::list>(outs);
    expect_shapes(*entries, names, tensors);
  }
  Tensors taken = take_tensors(tensors, Direction::read, priority);
  std::uint64_t* const digest = told ? told->mutable_data_ptr<std::uint64_t>() : nullptr;
  store::ReadList reads;
  std::uint64_t size = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    size += taken.memory.front().size();
    reads.push_back({call, std::move(names[i]), std::move((*entries)[i]), std::move(taken.memory.front()),
                     digest == nullptr ? nullptr : digest + i});
    taken.memory.pop_front();
  }
  call->future->set_operation({&self->place(), kUnknown, static_cast<std::int64_t>(size)});
  entries.reset();
  names = {};
  call->result = foreign(gives_list ? nb::object(tensors) : nb::object(tensors[0]));
  call->device = std::move(taken.device);
  nb::object result = wrap(call->future);
  if (call->device != nullptr) taken.keep.append(result);
  if (told) taken.keep.append(nb::steal(THPVariable_Wrap(told->detach())));
  // The result owns its tensor. The callback thread would have to drop a second owner, which needs the GIL while the
  // thread that waits for this read needs the GIL, too.
  if (const nb::object kept = taken.kept(); gives_list || !kept.is(tensors[0])) call->keep = foreign(kept);
  {
    const WithoutGil released;
    self->read(std::move(reads), call);
  }
  return result;
}

nb::object link(const StorePtr& self, const nb::dict& to_by_key) {
  const ParkingScope parking;
  refuse_after_fork();
  std::vector<store::Index::KeyLink> links;
  links.reserve(to_by_key.size());
  for (const auto [key, to] : to_by_key) links.push_back({key_of(key), key_of(to)});
  const std::string operand = links.size() == 1 ? links[0].key : std::to_string(links.size()) + " keys";
  const CallPtr call = new_call(Call::Kind::link, "link " + operand, 0);
  nb::object result = wrap(call->future);
  {
    const WithoutGil released;
    self->link(std::move(links), call);
  }
  return result;
}

nb::object map(const StorePtr& self, nb::list keys, bool verify) {
  refuse_after_fork();
  const Keys names = keys_of(keys);
  if (names.empty()) throw nb::value_error("there are no keys to map");
  if (self->is_closed()) throw Error(ErrorKind::invalid_state, "the store is closed");
  at::Tensor tensor;
  {
    const WithoutGil released;
    std::vector<store::EntryPtr> found;
    for (const std::string& name : names) {
      found.push_back(self->find(name));
      if (found.back() == nullptr) throw self->no_such_key(name);
    }
    tensor = store::map_tensors(found, names, verify);
  }
  return nb::steal(THPVariable_Wrap(std::move(tensor)));
}

nb::object erase(const StorePtr& self, nb::list keys) {
  const ParkingScope parking;
  refuse_after_fork();
  const Keys names = keys_of(keys);
  const CallPtr call = new_call_of(Call::Kind::deletion, "delete", names, 0);
  nb::object result = wrap(call->future);
  {
    const WithoutGil released;
    self->erase(names, call);
  }
  return result;
}

nb::object stat(const Store& self, nb::handle key) {
  refuse_after_fork();
  const std::string name = key_of(key);
  const store::EntryPtr found = find(self, name);
  if (found == nullptr) throw self.no_such_key(name);
  const std::vector<std::int64_t> sizes(found->shape.sizes.begin(), found->shape.sizes.end());
  const auto dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(found->shape.dtype));
  return nb::make_tuple(nb::borrow(dtype), nb::tuple(nb::cast(sizes)), found->size());
}

StorePtr open_store(const EngineHandle& engine, const std::string& folder, std::optional<bool> direct, bool checksum,
                    bool durable, const std::string& opening, std::uint64_t capacity) {
  Store::Options options;
  options.folder = folder;
  options.direct = !direct ? io::Direct::automatic : *direct ? io::Direct::yes : io::Direct::no;
  options.checksum = checksum;
  options.durable = durable;
  options.opening = opening == "write"  ? store::Opening::write
                    : opening == "read" ? store::Opening::read
                                        : store::Opening::salvage;
  options.capacity = capacity;
  refuse_after_fork();
  const WithoutGil released;
  return Store::open(engine.engine, options);
}

}  // namespace

void bind_store(nb::module_& m) {
  nb::class_<Store> store(m, "Store");
  bind_multipart_write(m, store);
  bind_snapshots(m, store);
  store
      .def("write", write, nb::arg("keys"), nb::arg("tensors"), nb::arg("priority"), nb::arg("digests").none(),
           nb::arg("written").none(), nb::arg("atomic"))
      .def("read", read, nb::arg("keys"), nb::arg("outs").none(), nb::arg("device").none(), nb::arg("gives_list"),
           nb::arg("priority"), nb::arg("digests").none())
      .def("link", link, nb::arg("links"))
      .def("map", map, nb::arg("keys"), nb::arg("verify"))
      .def("erase", erase, nb::arg("keys"))
      .def("flush",
           [](Store& self) {
             refuse_after_fork();
             return wrap(self.flush());
           })
      .def("keys",
           [](const Store& self) {
             refuse_after_fork();
             const WithoutGil released;
             return self.keys();
           })
      .def("stat", stat, nb::arg("key"))
      .def(
          "has",
          [](const Store& self, nb::handle key) {
            refuse_after_fork();
            return find(self, key_of(key)) != nullptr;
          },
          nb::arg("key"))
      .def_prop_ro("is_closed",
                   [](const Store& self) {
                     refuse_after_fork();  // another thread of the parent may have held the lock
                     return self.is_closed();
                   })
      .def("trim",
           [](Store& self) {
             refuse_after_fork();
             const WithoutGil released;
             return self.trim();
           })
      .def("statistics", store_statistics)
      .def("recovery", recovery_of)
      .def(
          "forget",
          [](Store& self, nb::list keys) {
            const Keys names = keys_of(keys);
            const WithoutGil released;
            self.forget(names);
          },
          nb::arg("keys"))
      .def("retire",
           [](Store& self) {
             refuse_after_fork();
             return wrap(self.retire());
           })
      .def("close", [](Store& self) {
        const ParkingScope parking;
        refuse_after_fork();
        const WithoutGil released;
        self.close();
      });
  m.def("open_store", open_store, nb::arg("engine"), nb::arg("folder"), nb::arg("direct").none(), nb::arg("checksum"),
        nb::arg("durable"), nb::arg("opening"), nb::arg("capacity"));
}

}  // namespace cudafuture::bind
