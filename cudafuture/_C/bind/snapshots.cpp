// Snapshots of keys, and reads of them.
#include <ATen/core/Tensor.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/future.h"
#include "bind/io.h"
#include "bind/store.h"
#include "bind/tensors.h"
#include "core/error.h"
#include "core/process.h"
#include "io/checksum.h"

namespace cudafuture::bind {
namespace {

using io::Direction;
using store::Call;
using store::CallPtr;
using store::Store;
using Version = store::Index::Version;

constexpr const char* kSnapshotDoc = R"(The tensor that a key had at one time; see ``DiskStore.snapshots()``.

A snapshot keeps the tensor's bytes on the disk, and in the store's `capacity`, until it is dropped.

>>> import torch
>>> from cudafuture.store import DiskStore
>>> store = DiskStore("states")
>>> store.write("weight", torch.eye(3)).wait()
36
>>> (snapshot,) = store.snapshots(["weight"])
>>> snapshot.key, snapshot.dtype, snapshot.shape, snapshot.nbytes
('weight', torch.float32, torch.Size([3, 3]), 36)
)";

struct Snapshot {
  std::weak_ptr<const Store> store;
  std::string key;
  store::EntryPtr entry;
  std::uint64_t version;

  bool is_of(const StorePtr& other) const noexcept { return !store.owner_before(other) && !other.owner_before(store); }
};

std::vector<Version> versions_of(const Store& store, const Keys& keys) {
  if (Version only; keys.size() == 1 && store.try_version(keys.front(), only)) return {std::move(only)};
  const WithoutGil released;
  return store.versions(keys);
}

nb::list snapshots(const StorePtr& self, nb::handle keys) {
  refuse_after_fork();
  Keys names = keys_of(keys);
  if (self->is_closed()) throw Error(ErrorKind::invalid_state, "the store is closed");
  std::vector<Version> found = versions_of(*self, names);
  nb::list result;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (found[i].entry == nullptr) {
      result.append(nb::none());
    } else {
      result.append(Snapshot{self, std::move(names[i]), std::move(found[i].entry), found[i].sequence});
    }
  }
  return result;
}

nb::object torch_size_of(const Snapshot& self) {
  static Imported size("torch", "Size");
  nb::list sizes;
  for (const std::int64_t each : self.entry->shape.sizes) sizes.append(each);
  return call(size(), sizes);
}

// Returns one part of a read; its bytes go into `out`.
store::Read read_of(const StorePtr& self, const CallPtr& call, const Snapshot& snapshot, nb::handle at,
                    nb::handle out) {
  if (!snapshot.is_of(self))
    throw nb::value_error(("the snapshot of key '" + snapshot.key + "' is of another store").c_str());
  const at::Tensor bytes = take_on_host(out);
  if (bytes.scalar_type() != at::kByte) {
    throw nb::value_error(
        (std::string("a part is read into a tensor of uint8, not ") + c10::toString(bytes.scalar_type())).c_str());
  }
  const std::uint64_t total = snapshot.entry->size();
  std::uint64_t begin = 0;
  if (!nb::try_cast(at, begin) || begin % io::Checksum::kLeaf != 0 || begin > total || bytes.nbytes() > total - begin) {
    throw nb::value_error(("key '" + snapshot.key + "': " + std::to_string(bytes.nbytes()) + " bytes at byte " +
                           repr_of(at) + " of " + std::to_string(total) +
                           " must begin at a multiple of 64 KiB and lie in the tensor")
                              .c_str());
  }
  return {call, snapshot.key, snapshot.entry, {}, nullptr, begin};
}

nb::object read_parts(const StorePtr& self, nb::list parts, nb::object digests, int priority) {
  const ParkingScope parking;
  refuse_after_fork();
  if (self->is_closed()) throw Error(ErrorKind::invalid_state, "the store is closed");
  const std::optional<at::Tensor> told = target_of(digests, at::kUInt64, parts.size(), "digests");
  wait_for_room(self->engine());
  const CallPtr call = new_call(Call::Kind::read, "read " + std::to_string(parts.size()) + " parts", priority);
  std::uint64_t* const digest = told ? told->mutable_data_ptr<std::uint64_t>() : nullptr;
  nb::list outs;
  store::ReadList reads;
  for (nb::handle part : parts) {
    if (!nb::isinstance<nb::tuple>(part) || nb::len(part) != 3 || !nb::isinstance<Snapshot>(part[0])) {
      throw nb::type_error("a part is a tuple of a Snapshot, a byte and a tensor");
    }
    const nb::object at = part[1], out = part[2];
    reads.push_back(read_of(self, call, *nb::inst_ptr<Snapshot>(part[0]), at, out));
    if (digest != nullptr) reads.back().digest = digest + outs.size();
    outs.append(out);
  }
  if (reads.size() == 1) call->future->set_name("read " + reads.front().key);
  Tensors taken = take_tensors(outs, Direction::read, priority);
  for (std::size_t i = 0; i < reads.size(); ++i) reads[i].memory = std::move(taken.memory[i]);
  if (told) taken.keep.append(nb::steal(THPVariable_Wrap(told->detach())));
  // Not kept in the call: the callback thread would have to drop it, which needs the GIL while the thread that waits
  // for this read needs the GIL, too.
  call->future->keep(foreign(std::move(taken.keep)));
  nb::object result = wrap(call->future);
  {
    const WithoutGil released;
    self->read(std::move(reads), call);
  }
  return result;
}

}  // namespace

void bind_snapshots(nb::module_& m, nb::class_<Store>& store) {
  nb::class_<Snapshot>(m, "Snapshot", kSnapshotDoc)
      .def_prop_ro(
          "key", [](const Snapshot& self) { return self.key; }, "The key, as it was looked up.")
      .def_prop_ro(
          "dtype",
          [](const Snapshot& self) {
            return nb::borrow(reinterpret_cast<PyObject*>(torch::getTHPDtype(self.entry->shape.dtype)));
          },
          "The dtype of the tensor.")
      .def_prop_ro("shape", torch_size_of, "The shape of the tensor, a torch.Size.")
      .def_prop_ro(
          "nbytes", [](const Snapshot& self) { return self.entry->size(); }, "The bytes of the tensor.")
      .def_prop_ro(
          "version", [](const Snapshot& self) { return self.version; },
          "A number that each write, link and deletion of the store increases; it is that of the write or link that "
          "the\n"
          "tensor is of.")
      .def_prop_ro(
          "digest",
          [](const Snapshot& self) {
            return self.entry->has_digest ? std::optional(self.entry->digest) : std::nullopt;
          },
          "The digest that the store keeps of the bytes, with `seed`; None: it keeps none. ``Digest.value(seed)`` of\n"
          "the same bytes is equal to it.")
      .def_prop_ro(
          "seed", [](const Snapshot& self) { return self.entry->seed; }, "The seed of `digest`.")
      .def("__repr__", [](const Snapshot& self) {
        return "<Snapshot of " + repr_of(nb::str(self.key.c_str())) + ", version " + std::to_string(self.version) +
               ", " + std::to_string(self.entry->size()) + " bytes>";
      });
  store.def("snapshots", snapshots, nb::arg("keys"))
      .def("read_parts", read_parts, nb::arg("parts"), nb::arg("digests").none(), nb::arg("priority"));
}

}  // namespace cudafuture::bind
