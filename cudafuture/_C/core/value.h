// What a future holds once it is done: a result or an error, in C++ form, in the embedding language's, or both.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <exception>
#include <utility>

#include "core/foreign.h"

namespace cudafuture {

// Written once before the future is published. Afterwards only `object` and `traceback` change, from empty to set, by
// whoever holds the interpreter's lock: a C++ value becomes an object of the language when somebody asks for one, and
// is the same object from then on.
class Value {
 public:
  enum class Form : std::uint8_t {
    object,  // `object`
    native,  // `native`, and `object` once somebody asked
    parts,   // `object` is a tuple of futures; the value is the list of their values, made when somebody asks
  };

  Value() = default;  // a result: nothing at all

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
  c10::IValue native;        // of other forms: what the binding keeps with the value
  std::exception_ptr error;  // of a failed future, when it was C++ that failed
  Form form = Form::object;
};

}  // namespace cudafuture
