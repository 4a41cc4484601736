// Method descriptors of CPython for methods that nanobind defines.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>

namespace cudafuture::bind {

// A method's function for calls that pass `count` arguments (0 or 1), and none by name. It takes the object and the
// argument, if any, and needs no conversion, which is most of the cost of a short method.
struct PlainCall {
  const char* method;
  Py_ssize_t count;
  nanobind::object (*function)(nanobind::handle self, nanobind::handle argument);
};

// Replaces the methods of a final class by method descriptors that call them. Dynamo binds a method descriptor to its
// object; a method of nanobind's own type is called without `self` in a function that torch.compile compiles. The
// descriptors have a signature for `inspect`, and their errors name the argument that does not fit it.
void use_method_descriptors(nanobind::handle cls, std::initializer_list<PlainCall> plain_calls = {});

}  // namespace cudafuture::bind
