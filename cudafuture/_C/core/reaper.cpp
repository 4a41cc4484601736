#include "core/reaper.h"

#include <vector>

#include "core/continuation.h"
#include "core/foreign.h"

namespace cudafuture {
namespace {

struct Frame {
  std::vector<void*> objects;
  std::vector<Continuation*> lists;
};

thread_local constinit Frame* outermost = nullptr;

void drain(Frame& frame) noexcept {
  while (!frame.objects.empty() || !frame.lists.empty()) {
    while (!frame.objects.empty()) {
      void* object = frame.objects.back();
      frame.objects.pop_back();
      foreign_runtime().release(object);
    }
    if (frame.lists.empty()) continue;
    Continuation* one = frame.lists.back();
    if (one->next != nullptr) {
      frame.lists.back() = one->next;
    } else {
      frame.lists.pop_back();
    }
    one->next = nullptr;
    one->abandon();
  }
}

}  // namespace

void reap_foreign(void* object) noexcept {
  if (outermost != nullptr) {
    outermost->objects.push_back(object);
    return;
  }
  Frame frame;
  outermost = &frame;
  foreign_runtime().release(object);
  drain(frame);
  outermost = nullptr;
}

void reap_continuations(Continuation* list) noexcept {
  if (list == nullptr) return;
  if (outermost != nullptr) {
    outermost->lists.push_back(list);
    return;
  }
  Frame frame;
  frame.lists.push_back(list);
  outermost = &frame;
  drain(frame);
  outermost = nullptr;
}

}  // namespace cudafuture
