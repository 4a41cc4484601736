#include "threads.h"

#include <pthread.h>

namespace cudafuture::fake {

void on_small_stack(const std::function<void()>& body) {
  constexpr std::size_t kStack = 256 * 1024;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStack);
  pthread_t thread;
  const auto start = [](void* argument) -> void* {
    (*static_cast<const std::function<void()>*>(argument))();
    return nullptr;
  };
  pthread_create(&thread, &attributes, start, const_cast<std::function<void()>*>(&body));
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

}  // namespace cudafuture::fake
