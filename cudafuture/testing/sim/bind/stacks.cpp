#include "sim/bind/stacks.h"

#include <nanobind/nanobind.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "machine/operators/python_calls.h"
#include "sim/device/here.h"

namespace sim {
namespace {

namespace nb = nanobind;

constexpr std::size_t kMaxFrames = 24;  // of each stack, so that a site has a fixed size

// Code objects of stacks that were destroyed on a thread without the GIL; the next thread with the GIL drops them.
class Leftovers {
 public:
  void add(PyObject* code) {
    const std::lock_guard lock(mutex_);
    codes_.push_back(code);
  }
  void drop() {
    std::vector<PyObject*> codes;
    {
      const std::lock_guard lock(mutex_);
      codes.swap(codes_);
    }
    for (PyObject* code : codes) Py_DECREF(code);
  }

 private:
  std::mutex mutex_;
  std::vector<PyObject*> codes_;
};

Leftovers& leftovers() {
  static auto* list = new Leftovers;
  return *list;
}

// The innermost frames of a thread. Code objects outlive what is done with them, as a rule: their functions hold them.
struct Frames {
  struct Frame {
    PyObject* code;
    int last_instruction;
  };
  std::array<Frame, kMaxFrames> frames;
  std::size_t depth = 0;

  ~Frames() {
    if (!Py_IsInitialized()) return;
    const bool has_gil = PyGILState_Check() != 0;
    for (std::size_t i = 0; i < depth; ++i) {
      if (has_gil) {
        Py_DECREF(frames[i].code);
      } else {
        leftovers().add(frames[i].code);
      }
    }
  }
};

// True if Python has a state for this thread. Only then may the thread request the GIL: making a state could wait for a
// thread that waits for this one.
bool is_python_thread() noexcept { return Py_IsInitialized() != 0 && PyGILState_GetThisThreadState() != nullptr; }

HostStack take_stack() {
  if (!is_python_thread()) return {};
  const nb::gil_scoped_acquire gil;
  leftovers().drop();
  auto stack = std::make_shared<Frames>();
  StackPlace place;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && stack->depth < kMaxFrames) {
    auto& kept = stack->frames[stack->depth++];
    kept = {reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)), PyFrame_GetLasti(frame)};
    place.add_frame(kept.code, kept.last_instruction);
    PyFrameObject* const outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  return {std::move(stack), place};
}

std::string format_stack(const void* pointer) {
  const auto& stack = *static_cast<const Frames*>(pointer);
  std::string text;
  for (std::size_t i = stack.depth; i-- > 0;) {
    auto* const code = reinterpret_cast<PyCodeObject*>(stack.frames[i].code);
    const int line = PyCode_Addr2Line(code, stack.frames[i].last_instruction);
    text += std::string(nb::str(nb::handle(code->co_filename)).c_str()) + ":" + std::to_string(line) + " in " +
            nb::str(nb::handle(code->co_name)).c_str() + "\n";
  }
  return text;
}

bool may_call() noexcept { return is_python_thread(); }

}  // namespace

void install_stacks() {
  set_stack_hooks(&take_stack, &format_stack);
  set_may_call_python(&may_call);
}

}  // namespace sim
