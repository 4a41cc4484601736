// Checksums of host tensors.
#include <ATen/core/Tensor.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bind/future.h"
#include "bind/tensors.h"
#include "io/checksum.h"

namespace cudafuture::bind {
namespace {

using io::Checksum;

// Returns the checksums of parts of a tensor's bytes, given as offsets and lengths. `seeds`: one for each part.
std::vector<std::uint64_t> digests_of(nb::handle object, nb::list parts, const std::vector<std::uint64_t>& seeds) {
  const at::Tensor tensor = take_on_host(object);
  const std::size_t size = tensor.nbytes();
  std::vector<std::pair<std::size_t, std::size_t>> places(nb::len(parts));
  if (seeds.size() != places.size()) throw nb::value_error("expected one seed for each part");
  for (std::size_t i = 0; i < places.size(); ++i) {
    auto& [at, length] = places[i];
    if (!nb::try_cast(parts[i], places[i]) || at > size || length > size - at) {
      const std::string what = repr_of(parts[i]);
      throw nb::value_error(
          (what + " is not an offset and a length within a tensor of " + std::to_string(size) + " bytes").c_str());
    }
  }
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  std::vector<std::uint64_t> digests;
  const WithoutGil released;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto& [at, length] = places[i];
    digests.push_back(io::digest_of(data + at, length, seeds[i]));
  }
  return digests;
}

// Hashes a tensor as the bytes from `at` on, which begin with a leaf. Returns their own checksum. Other threads may
// hash other bytes at the same time.
std::uint64_t take(Checksum& self, std::size_t at, nb::handle object) {
  const at::Tensor tensor = take_on_host(object);
  const iovec bytes = {const_cast<void*>(tensor.const_data_ptr()), tensor.nbytes()};
  const WithoutGil released;
  self.take(at, &bytes, 1);
  return self.digest_within(0, at, bytes.iov_len);
}

}  // namespace

void bind_digests(nb::module_& m) {
  m.def(
      "set_hash", [](std::uintptr_t function) { io::set_hash(reinterpret_cast<io::Hash>(function)); },
      nb::arg("function"));
  m.def("digests_of", digests_of, nb::arg("tensor"), nb::arg("parts"), nb::arg("seeds"));
  nb::class_<Checksum>(m, "Checksum")
      .def(
          "__init__",
          [](Checksum* self, std::size_t size) {
            new (self) Checksum();
            self->add(0, size);
          },
          nb::arg("size"))
      .def("take", take, nb::arg("at"), nb::arg("bytes"))
      .def(
          "digest", [](const Checksum& self, std::uint64_t seed) { return self.digest(0, seed); }, nb::arg("seed") = 0);
}

}  // namespace cudafuture::bind
