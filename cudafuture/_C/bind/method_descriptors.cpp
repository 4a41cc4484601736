#include "bind/method_descriptors.h"

#include <c10/util/Exception.h>

#include <array>
#include <string_view>
#include <utility>
#include <vector>

namespace cudafuture::bind {

namespace nb = nanobind;

namespace {

// The objects that it points to live as long as the process.
struct Method {
  PyMethodDef definition;  // first: a descriptor points to it
  PyObject* function;      // nanobind's
  vectorcallfunc call;
};

std::array<Method, 32> methods;
size_t number_of_methods = 0;

// Calls the method of a descriptor: `arguments` begin with the object.
PyObject* call_descriptor(PyObject* descriptor, PyObject* const* arguments, size_t number, PyObject* names) {
  const auto* method = reinterpret_cast<Method*>(reinterpret_cast<PyMethodDescrObject*>(descriptor)->d_method);
  return method->call(method->function, arguments, number, names);
}

// Calls a method where CPython passes the object apart, and nothing that names the method: each has its own function.
template <size_t index>
PyObject* call_method(PyObject* self, PyObject* const* arguments, Py_ssize_t number, PyObject* names) {
  const Method& method = methods[index];
  if (number == 0 && names == nullptr) return method.call(method.function, &self, 1, nullptr);
  if (number == 1 && names == nullptr) {
    PyObject* const both[] = {self, arguments[0]};
    return method.call(method.function, both, 2, nullptr);
  }
  std::vector<PyObject*> all{self};
  all.insert(all.end(), arguments, arguments + number + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)));
  return method.call(method.function, all.data(), number + 1, names);
}

template <size_t... index>
constexpr auto calls_of_methods(std::index_sequence<index...>) {
  return std::array{call_method<index>...};
}

constexpr auto method_calls = calls_of_methods(std::make_index_sequence<std::tuple_size_v<decltype(methods)>>());

const char* text_attribute(nb::handle function, const char* attribute) {
  return PyUnicode_AsUTF8(nb::object(function.attr(attribute)).release().ptr());
}

}  // namespace

void use_method_descriptors(nb::handle cls) {
  nb::dict attributes;
  attributes.update(cls.attr("__dict__"));
  for (auto [name, function] : attributes) {
    const bool is_special = std::string_view(nb::str(name).c_str()).starts_with("__");
    if (is_special || std::string_view(Py_TYPE(function.ptr())->tp_name) != "nanobind.nb_method") continue;
    TORCH_INTERNAL_ASSERT(number_of_methods < methods.size(), "enlarge methods");
    Method& method = methods[number_of_methods];
    method.function = function.inc_ref().ptr();
    method.call = PyVectorcall_Function(method.function);
    method.definition = {text_attribute(function, "__name__"),
                         reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method_calls[number_of_methods++])),
                         METH_FASTCALL | METH_KEYWORDS, text_attribute(function, "__doc__")};
    const nb::object descriptor =
        nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(cls.ptr()), &method.definition));
    reinterpret_cast<PyMethodDescrObject*>(descriptor.ptr())->vectorcall = call_descriptor;
    nb::setattr(cls, name, descriptor);
  }
}

}  // namespace cudafuture::bind
