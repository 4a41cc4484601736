// Conversions of Python arguments that all bindings of a store use.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/python.h"
#include "store/store.h"

namespace cudafuture::bind {

using StorePtr = std::shared_ptr<store::Store>;
using Keys = std::vector<std::string>;

std::string key_of(nb::handle object);  // throws TypeError and ValueError
Keys keys_of(nb::handle objects);

store::CallPtr new_call(store::Call::Kind kind, const std::string& name, int priority);

// Returns a contiguous one-dimensional host tensor with an element for each of `count` results; none for None. `what`
// names the results in the ValueError for any other tensor.
std::optional<at::Tensor> target_of(nb::object object, at::ScalarType dtype, std::size_t count, const char* what);

nb::dict store_statistics(const store::Store& self);
nb::dict recovery_of(const store::Store& self);  // the findings when it was opened

void bind_multipart_write(nb::module_& m, nb::class_<store::Store>& store);
void bind_snapshots(nb::module_& m, nb::class_<store::Store>& store);

}  // namespace cudafuture::bind
