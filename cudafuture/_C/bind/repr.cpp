// The text that shows a future: its state, its error, the operation and the futures that it was made from.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bind/future.h"
#include "core/pending.h"

namespace cudafuture::bind {
namespace {

constexpr std::size_t kMaxParts = 4;
constexpr std::size_t kMaxError = 200;  // characters

// Returns the names of the parts of a combination that is pending, or whose value has not been retrieved.
std::vector<std::string> parts_of(const Future& future) {
  std::vector<std::string> names;
  if (!future.done()) {
    for (const CombinationPart& part : future.parts()) names.push_back(part.future->name());
  } else if (future.value().form == Value::Form::parts) {
    const auto parts = nb::borrow<nb::tuple>(static_cast<PyObject*>(future.value().object.get()));
    for (nb::handle part : parts) names.push_back(core_of(part).name());
  }
  return names;
}

std::string operation_of(const Future& future) {
  const Maker maker = future.maker();
  if (maker == Maker::none) return {};
  std::string text = std::string(", ") + name_of(maker);
  if (maker == Maker::submit) return text;
  if (maker < Maker::gather) return text + " of " + quoted_name(future.name());  // a child has its parent's name
  const std::vector<std::string> parts = parts_of(future);
  const std::size_t shown = std::min(parts.size(), kMaxParts);
  for (std::size_t i = 0; i < shown; ++i) text += (i == 0 ? " of " : ", ") + quoted_name(parts[i]);
  if (parts.size() > shown) text += " and " + std::to_string(parts.size() - shown) + " more";
  return text;
}

// Returns the words of the engine for its operation, such as the group, the number and the tensors of a collective.
std::string origin_of(const Future& future) {
  const nb::handle origin = static_cast<PyObject*>(future.origin());
  if (!origin.is_valid()) return {};
  try {
    return utf8_of(nb::str(origin));
  } catch (nb::python_error& e) {
    e.discard_as_unraisable("cudafuture");
    return {};
  }
}

std::string age_of(const Future& future) {
  char age[32];
  std::snprintf(age, sizeof age, "%.3gs", std::chrono::duration<double>(future.age()).count());
  return age;
}

// Returns the error of a failed future as text, without marking it seen. Its own repr may raise, or show the future.
std::string error_of(Future& future) {
  const Value& value = future.value();
  if (future.state() != State::failed || (!value.object && value.error == nullptr)) return {};
  const nb::object error = unseen_exception_of(future);
  const std::string type = nb::str(error.type().attr("__name__")).c_str();
  if (Py_ReprEnter(error.ptr()) != 0) {
    PyErr_Clear();
    return " with " + type;
  }
  std::string text = type;
  try {
    text = repr_of(error);
  } catch (nb::python_error&) {
    park_if_unwinding();
  }
  Py_ReprLeave(error.ptr());
  if (text.size() > kMaxError) {
    std::size_t end = kMaxError;
    while ((static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;  // between two characters of UTF-8
    text = text.substr(0, end) + "...";
  }
  return " with " + text;
}

}  // namespace

std::string repr(Future& future) {
  std::string text = "<CUDAFuture";
  if (!future.name().empty()) text += " '" + future.name() + "'";
  text += std::string(" ") + name_of(future.state()) + error_of(future);
  const std::vector<c10::Device> devices = future.devices();
  if (!devices.empty()) text += " on " + device_set(devices);
  if (const std::string origin = origin_of(future); !origin.empty()) text += ", " + origin;
  text += operation_of(future);
  if (const std::string site = future.site(); !site.empty()) text += ", made at " + site;
  return text + ", " + age_of(future) + " old>";
}

void keep_site(Future& future) {
  static Imported call_site{"cudafuture._frames", "call_site"};
  future.set_site(utf8_of(call(call_site())));
}

}  // namespace cudafuture::bind
