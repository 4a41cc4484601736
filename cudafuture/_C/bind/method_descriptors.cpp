#include "bind/method_descriptors.h"

#include <c10/util/Exception.h>

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/errors.h"

namespace cudafuture::bind {
namespace {

// The objects that it points to live as long as the process.
struct Method {
  PyMethodDef definition;  // first: a descriptor points to it
  PyObject* function;      // nanobind's
  vectorcallfunc call;
  std::string doc;
  PyObject* descriptor;
  PlainCall plain{nullptr, -1, nullptr};
};

std::array<Method, 32> methods;
size_t number_of_methods = 0;

// Gives the error of a failed call a text that names the argument, if the arguments do not fit the signature.
[[gnu::noinline, gnu::cold]] void explain(const Method& method, PyObject* const* arguments, size_t number,
                                          PyObject* names) noexcept {
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) return;
  static Imported explain_call{"cudafuture._arguments", "explain_call"};
  try {
    nb::python_error error;
    nb::list given;
    for (size_t i = 0; i < static_cast<size_t>(PyVectorcall_NARGS(number)); ++i) given.append(nb::handle(arguments[i]));
    const nb::object by_name = names == nullptr ? nb::object(nb::tuple()) : nb::borrow(names);
    const nb::object text =
        call(explain_call(), error.value(), nb::handle(method.descriptor), nb::tuple(given), by_name);
    if (text.is_none()) {
      error.restore();
    } else {
      PyErr_SetObject(PyExc_TypeError, text.ptr());
    }
  } catch (nb::python_error& e) {
    e.restore();
  }
}

PyObject* call_plain(const PlainCall& plain, PyObject* self, PyObject* const* argument) noexcept {
  try {
    return plain.function(self, plain.count == 0 ? nullptr : *argument).release().ptr();
  } catch (nb::python_error& e) {
    e.restore();
  } catch (...) {
    try {
      raise(exception_of(std::current_exception()));
    } catch (nb::python_error& e) {  // or that of the conversion
      e.restore();
    }
  }
  return nullptr;
}

// Calls a function of nanobind: `arguments` begin with the object.
PyObject* call_function(const Method& method, PyObject* const* arguments, size_t number, PyObject* names) {
  PyObject* const result = method.call(method.function, arguments, number, names);
  if (result == nullptr) explain(method, arguments, number, names);
  return result;
}

PyObject* call_descriptor(PyObject* descriptor, PyObject* const* arguments, size_t number, PyObject* names) {
  const auto* method = reinterpret_cast<Method*>(reinterpret_cast<PyMethodDescrObject*>(descriptor)->d_method);
  return call_function(*method, arguments, number, names);
}

// Calls a method where CPython passes the object apart, of the class that the descriptor names, and nothing that names
// the method: each has its own function. The interpreter's calls of methods come here.
template <size_t index>
PyObject* call_method(PyObject* self, PyObject* const* arguments, Py_ssize_t number, PyObject* names) {
  const Method& method = methods[index];
  if (number == method.plain.count && names == nullptr && nb::inst_ready(self)) {
    return call_plain(method.plain, self, arguments);
  }
  if (number == 0 && names == nullptr) return call_function(method, &self, 1, nullptr);
  std::vector<PyObject*> all{self};
  all.insert(all.end(), arguments, arguments + number + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)));
  return call_function(method, all.data(), number + 1, names);
}

template <size_t... index>
constexpr auto calls_of_methods(std::index_sequence<index...>) {
  return std::array{call_method<index>...};
}

constexpr auto method_calls = calls_of_methods(std::make_index_sequence<std::tuple_size_v<decltype(methods)>>());

// Returns nanobind's docstring behind the signature that CPython makes of its first line: `self` has a mark, and
// arguments have no types.
std::string with_text_signature(std::string_view doc) {
  const std::string_view head = doc.substr(0, doc.find(") ->"));
  const size_t self = head.find("self");
  std::string signature = std::string(head.substr(0, self)) + '$';
  int depth = 0;
  bool is_type = false;
  for (const char c : head.substr(self)) {
    depth += (c == '[' || c == '(') - (c == ']' || c == ')');
    if (depth == 0 && c == ':') is_type = true;
    if (depth == 0 && (c == ',' || c == '=')) is_type = false;
    if (!is_type) signature += c;
  }
  return signature + ")\n--\n\n" + std::string(doc);
}

}  // namespace

void use_method_descriptors(nb::handle cls, std::initializer_list<PlainCall> plain_calls) {
  nb::dict attributes;
  attributes.update(cls.attr("__dict__"));
  for (auto [name, function] : attributes) {
    const bool is_special = std::string_view(nb::str(name).c_str()).starts_with("__");
    if (is_special || std::string_view(Py_TYPE(function.ptr())->tp_name) != "nanobind.nb_method") continue;
    TORCH_INTERNAL_ASSERT(number_of_methods < methods.size(), "enlarge methods");
    Method& method = methods[number_of_methods];
    method.function = function.inc_ref().ptr();
    method.call = PyVectorcall_Function(method.function);
    method.doc = with_text_signature(nb::cast<std::string>(function.attr("__doc__")));
    method.definition = {PyUnicode_AsUTF8(name.inc_ref().ptr()),
                         reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method_calls[number_of_methods++])),
                         METH_FASTCALL | METH_KEYWORDS, method.doc.c_str()};
    for (const PlainCall& plain : plain_calls) {
      if (std::string_view(plain.method) == method.definition.ml_name) method.plain = plain;
    }
    const nb::object descriptor =
        nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(cls.ptr()), &method.definition));
    reinterpret_cast<PyMethodDescrObject*>(descriptor.ptr())->vectorcall = call_descriptor;
    method.descriptor = descriptor.ptr();
    nb::setattr(cls, name, descriptor);
  }
}

}  // namespace cudafuture::bind
