#include "fakecuda/nccl/residency.h"

#include <stdlib.h>

#include <map>
#include <mutex>

namespace fakenccl {
namespace {

struct Channels {
  std::mutex mutex;
  std::map<int, int> used;  // by device
  const int limit = [] {
    const char* value = getenv("FAKENCCL_CHANNELS");
    return value == nullptr ? 0 : atoi(value);
  }();
};

Channels& channels() {
  static auto* const object = new Channels;
  return *object;
}

}  // namespace

bool take_channel(int device) {
  const std::lock_guard lock(channels().mutex);
  int& used = channels().used[device];
  if (channels().limit > 0 && used >= channels().limit) return false;
  ++used;
  return true;
}

bool release_channel(int device) {
  const std::lock_guard lock(channels().mutex);
  --channels().used[device];
  return channels().limit > 0;
}

}  // namespace fakenccl

extern "C" int fakenccl_running_kernels(int device) {
  const std::lock_guard lock(fakenccl::channels().mutex);
  return fakenccl::channels().used[device];
}
