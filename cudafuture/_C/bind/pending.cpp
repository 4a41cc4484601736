#include "bind/pending.h"

#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <structmember.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/future.h"
#include "core/debug_socket.h"
#include "core/pending.h"
#include "core/progress.h"

namespace cudafuture::bind {
namespace {

constexpr const char* kFindPlace = R"(
Return the place with a kind and a name, always the same one. Places are never freed: use few.

Args:
    kind: such as "worker".
    name: such as "w1".
    preposition: before both in texts; empty: texts do not name the place, since the names of its operations do.

>>> from cudafuture.debug import OperationPlace
>>> OperationPlace.find("bucket", "checkpoints", "in")
<OperationPlace in bucket 'checkpoints'>
)";
constexpr std::size_t kMaxLeaves = 4;
constexpr std::size_t kMostWalked = 100'000;      // futures that an error looks at
constexpr std::chrono::milliseconds kYoung{100};  // programs poll with short timeouts: then only parts are looked at

std::vector<std::string>& library_folders() {
  static auto* folders = new std::vector<std::string>;
  return *folders;
}

bool is_library(std::string_view file) {
  for (const std::string& folder : library_folders()) {
    if (file.starts_with(folder)) return true;
  }
  return false;
}

// Returns the text of an ASCII string, without the GIL; empty for others.
std::string_view ascii_of(PyObject* text) {
  if (text == nullptr || !PyUnicode_Check(text) || !PyUnicode_IS_COMPACT_ASCII(text)) return {};
  return {reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(text)),
          static_cast<std::size_t>(PyUnicode_GET_LENGTH(text))};
}

// Returns the ranks of a group that have not issued an operation, as text; empty: all have, or it is not known.
std::string not_issued_by(const OperationFacts& facts) {
  if (facts.place == nullptr || facts.place->progress == nullptr || facts.number == kUnknown) return {};
  static Imported ranks{"cudafuture._progress", "not_issued_by"};
  try {
    return utf8_of(call(ranks(), nb::cast(DebugSocket::get().folder()), nb::cast(facts.place->progress->id()),
                        nb::cast(facts.number)));
  } catch (nb::python_error& e) {
    e.discard_as_unraisable("cudafuture");
    return {};
  }
}

// Returns the pending futures that the garbage collector knows: those of user code, which are in no registry.
std::vector<WeakFuture> collected_futures() {
  static Imported get_objects{"gc", "get_objects"};
  std::vector<WeakFuture> futures;
  const nb::object objects = call(get_objects());
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects.ptr()); ++i) {
    Future* const future = core_of_or_null(PyList_GET_ITEM(objects.ptr(), i));
    if (future != nullptr && !future->done()) futures.emplace_back(*future);
  }
  return futures;
}

// Returns the graph as JSON; with `roots`, which the caller keeps, it names their indices.
std::string pending_text(nb::list roots) {
  std::vector<const Future*> named;
  std::vector<WeakFuture> futures = collected_futures();
  for (nb::handle root : roots) {  // also those that gc.freeze() hides
    named.push_back(&expect_future(root, "pending()"));
    futures.emplace_back(expect_future(root, "pending()"));
  }
  const WithoutGil released;
  return as_json(PendingGraph::walk(std::move(futures), PendingGraph::From::threads), SIZE_MAX, named);
}

// Returns the number of the line that a frame is in. Python computes it from the code's table of lines, up to that
// line: the last few are kept. Requires the GIL.
int line_in(PyFrameObject* frame, [[maybe_unused]] PyCodeObject* code) {
#if PY_VERSION_HEX >= 0x030B0000
  struct Known {
    PyCodeObject* code = nullptr;  // a reference: another code may get the address of one that has died
    int instruction = 0;
    int line = 0;
  };
  static std::array<Known, 64> known;
  const int instruction = PyFrame_GetLasti(frame);
  Known& place = known[(reinterpret_cast<std::uintptr_t>(code) / 64 + static_cast<std::size_t>(instruction)) % 64];
  if (place.code != code || place.instruction != instruction) {
    const int line = PyFrame_GetLineNumber(frame);
    Py_INCREF(code);
    PyCodeObject* const before = std::exchange(place, {code, instruction, line}).code;
    Py_XDECREF(before);
    return line;
  }
  return place.line;
#else
  return PyFrame_GetLineNumber(frame);
#endif
}

// Returns the function below a functools.partial, which submit() makes of a function and its arguments; any other
// object as it is. Without the interpreter.
PyObject* without_arguments(PyObject* function) {
  for (int depth = 0; depth < 8; ++depth) {  // one may be below itself
    const PyTypeObject* const type = Py_TYPE(function);
    const PyMemberDef* const first = type->tp_members;
    if (std::string_view(type->tp_name) != "functools.partial" || first == nullptr || first->name == nullptr ||
        std::string_view(first->name) != "func")
      return function;
    PyObject* const below = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(function) + first->offset);
    if (below == nullptr) return function;
    function = below;
  }
  return function;
}

}  // namespace

CodeLine calling_line() {
  nb::object frame = nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame.is_valid()) {
    auto* const current = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(current)));
    auto* const fields = reinterpret_cast<PyCodeObject*>(code.ptr());
    const char* const file = PyUnicode_AsUTF8(fields->co_filename);  // kept by the code, which the frame keeps
    const char* const function = PyUnicode_AsUTF8(fields->co_name);
    if (file == nullptr || function == nullptr) {  // a lone surrogate
      PyErr_Clear();
      return {};
    }
    if (!is_library(file)) return {file, line_in(current, fields), function};
    frame = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(current)));
  }
  return {};
}

std::string describe_function(void* object) {
  PyObject* function = without_arguments(static_cast<PyObject*>(object));
  if (PyMethod_Check(function)) function = PyMethod_GET_FUNCTION(function);
  if (!PyFunction_Check(function)) return Py_TYPE(function)->tp_name;
  const auto* const code = reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(function));
  std::string text(ascii_of(reinterpret_cast<PyFunctionObject*>(function)->func_qualname));
  const std::string_view file = ascii_of(code->co_filename);
  if (!file.empty())
    text += (text.empty() ? "" : " at ") + std::string(file) + ":" + std::to_string(code->co_firstlineno);
  return text;
}

std::string pending_leaves(Future& future) {
  const bool is_young = future.age() < kYoung;
  std::vector<WeakFuture> roots;
  roots.emplace_back(future);
  using From = PendingGraph::From;
  const PendingGraph graph =
      PendingGraph::walk(std::move(roots), is_young ? From::roots : From::operations, kMostWalked);
  const std::int64_t index = graph.index_of(future);
  if (index < 0) return {};
  const std::vector<std::uint32_t> leaves = graph.leaves_of(static_cast<std::uint32_t>(index), kMaxLeaves + 1);
  std::string text;
  for (std::size_t i = 0; i < leaves.size() && i < kMaxLeaves; ++i) {
    const PendingNode& leaf = graph.nodes()[leaves[i]];
    const OperationFacts* const facts = leaf.future->operation();
    if (leaf.future.get() == &future && facts == nullptr && !leaf.is_due && !leaf.is_running) return {};
    text += i > 0 ? ", " : leaf.future.get() == &future ? ". It is " : ". It waits for ";
    text += description_of(*leaf.future);
    if (is_young) continue;
    if (const std::string reason = graph.reason(leaf); !reason.empty()) {
      text += " (" + reason + graph.blockers(leaf) + ")";
    }
    if (facts == nullptr) continue;
    if (const std::string ranks = not_issued_by(*facts); !ranks.empty()) text += " (not issued by " + ranks + ")";
  }
  return leaves.size() > kMaxLeaves || graph.is_cut() ? text + " and more" : text;
}

void bind_pending(nb::module_& m) {
  nb::class_<OperationPlace>(m, "OperationPlace", "Place of operations: a worker, a store, a stage, a process group.")
      .def_static("find", &OperationPlace::find, nb::arg("kind"), nb::arg("name"), nb::arg("preposition") = "of",
                  nb::rv_policy::reference, kFindPlace)
      .def_static(
          "_of_group",
          [](const std::string& name, const std::string& id, int rank, int size) -> OperationPlace& {
            OperationPlace& place = OperationPlace::make("group", name, "of");
            DebugSocket::require();
            place.progress = ProgressFile::get().add_group(name, id, rank, size);
            return place;
          },
          nb::arg("name"), nb::arg("id"), nb::arg("rank"), nb::arg("size"), nb::rv_policy::reference)
      .def(
          "_uncounted",
          [](const OperationPlace& place) -> OperationPlace& {
            OperationPlace& other = *new OperationPlace(place);
            other.is_counted = false;
            return other;
          },
          nb::rv_policy::reference)
      .def("_capsule", [](OperationPlace& place) { return nb::capsule(&place, "OperationPlace"); })
      .def("__repr__", [](const OperationPlace& place) { return "<OperationPlace " + place.text + ">"; });
  m.def(
      "register",
      [](nb::handle future, const OperationPlace* place, std::int64_t number, std::int64_t bytes) {
        expect_future(future, "register()").set_operation({place, number, bytes});
      },
      nb::arg("future"), nb::arg("place").none() = nb::none(), nb::arg("number") = kUnknown,
      nb::arg("bytes") = kUnknown);
  m.def("pending", pending_text, nb::arg("roots"));
  m.def(
      "set_debug_socket",
      [](std::string folder, std::string version) {
        DebugSocket::get().configure(std::move(folder), std::move(version));
      },
      nb::arg("folder"), nb::arg("version"));
  m.def("restart_debug_socket", [] { DebugSocket::get().start_in_child(); });
  m.def(
      "set_rank",
      [](int rank, int size) {
        DebugSocket::require();
        ProgressFile::get().set_rank(rank, size);
      },
      nb::arg("rank"), nb::arg("size"));
  m.def(
      "set_worker",
      [](std::string_view name) {
        DebugSocket::require();
        ProgressFile::get().set_worker(name);
      },
      nb::arg("name"));
  m.def(
      "set_library_folders", [](std::vector<std::string> folders) { library_folders() = std::move(folders); },
      nb::arg("folders"));
}

}  // namespace cudafuture::bind
