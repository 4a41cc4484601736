// Method descriptors of CPython for methods that nanobind defines.
#pragma once

#include <nanobind/nanobind.h>

namespace cudafuture::bind {

// Replaces the methods of a class by method descriptors that call them. Dynamo binds a method descriptor to its object;
// a method of nanobind's own type is called without `self` in a function that torch.compile compiles.
void use_method_descriptors(nanobind::handle cls);

}  // namespace cudafuture::bind
