// The result or the error of a done future, in C++ form, in the embedding language's form, or in both.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <exception>
#include <utility>

#include "core/foreign.h"

namespace cudafuture {

// Written once before the future is published. Afterwards only `object` and `traceback` change, from empty to set,
// under the interpreter's lock. A C++ value becomes a foreign object on the first request, and stays the same object.
class Value {
 public:
  enum class Form : std::uint8_t {
    object,  // `object`
    native,  // `native`, and `object` after the first request
    parts,   // `object` is a tuple of futures; the value is the list of their values, made on request
  };

  Value() = default;  // an empty result

  static Value of_object(Foreign object) {
    Value v;
    v.object = std::move(object);
    return v;
  }
  static Value of_parts(Foreign futures) {
    Value v;
    v.form = Form::parts;
    v.object = std::move(futures);
    return v;
  }
  static Value of_native(c10::IValue native) {
    Value v;
    v.form = Form::native;
    v.native = std::move(native);
    return v;
  }
  static Value of_error(std::exception_ptr error) {
    Value v;
    v.form = Form::native;
    v.error = std::move(error);
    return v;
  }
  static Value of_error(Foreign exception, Foreign traceback) {
    Value v;
    v.object = std::move(exception);
    v.traceback = std::move(traceback);
    return v;
  }

  Foreign object;
  Foreign traceback;         // of an exception: as it was when the future failed
  c10::IValue native;        // of other forms: data that the binding keeps with the value
  std::exception_ptr error;  // of a future that failed in C++
  Form form = Form::object;
};

}  // namespace cudafuture
