#include "fakecuda/nccl/creation.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include <algorithm>

#include "fakecuda/devices/launch.h"
#include "fakecuda/nccl/error.h"
#include "fakecuda/nccl/group.h"

namespace fakenccl {
namespace {

// Two FNV-1a hashes of the bytes, in hexadecimal: the name of a segment.
std::string hash(const void* bytes, size_t size) {
  uint64_t words[2] = {14695981039346656037u, 10959999348734560631u};
  for (size_t i = 0; i < size; ++i)
    for (uint64_t& word : words) word = (word ^ static_cast<const unsigned char*>(bytes)[i]) * 1099511628211u;
  char text[33];
  snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(words[0]),
           static_cast<unsigned long long>(words[1] ^ words[0] << 7));
  return text;
}

std::string hash(const std::string& text) { return hash(text.data(), text.size()); }

ncclResult_t check_config(const ncclConfig_t* config) {
  if (config == nullptr || config->magic == NCCL_API_MAGIC) return ncclSuccess;
  return fail(ncclInvalidArgument, "The configuration is not initialised. Use NCCL_CONFIG_INITIALIZER.");
}

// NCCL user guide, ncclConfig_t: blocking is 1 by default. NCCL_COMM_BLOCKING overrides it.
bool is_blocking(const ncclConfig_t* config, bool inherited) {
  const char* environment = getenv("NCCL_COMM_BLOCKING");
  if (environment != nullptr && *environment != 0) return atoi(environment) != 0;
  if (config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT) return inherited;
  return config->blocking != 0;
}

// A child is on its parent's device, whichever is current.
ncclComm* make_child(const ncclComm& parent, const ncclConfig_t* config) {
  auto* child = new ncclComm(is_blocking(config, parent.blocking));
  child->device = parent.device;
  child->bus_id = parent.bus_id;
  return child;
}

// Return the ranks of the parent that are in the child, in the child's order: by key, and by rank where keys are equal
// (NCCL user guide, ncclCommSplit).
std::vector<int> members_of(const std::vector<HostMessage>& messages, int color) {
  std::vector<int> members;
  for (int rank = 0; rank < static_cast<int>(messages.size()); ++rank)
    if (messages[rank].color == color) members.push_back(rank);
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return messages[a].key < messages[b].key; });
  return members;
}

ncclResult_t join_child(ncclComm* child, const ncclComm& parent, const std::vector<int>& members,
                        const std::string& name) {
  const auto own = std::find(members.begin(), members.end(), parent.rank);
  return child->initialise(hash(name), static_cast<int>(members.size()), static_cast<int>(own - members.begin()));
}

}  // namespace

ncclResult_t make_unique_id(ncclUniqueId* id) {
  remove_abandoned_segments();
  if (getrandom(id->internal, sizeof id->internal, 0) != sizeof id->internal)
    return fail(ncclSystemError, std::string("getrandom failed: ") + strerror(errno));
  return ncclSuccess;
}

ncclResult_t create(ncclComm_t* communicator, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config) {
  ncclResult_t result = check_not_forked();
  if (result == ncclSuccess && cudaFree(nullptr) != cudaSuccess)
    result = fail(ncclUnhandledCudaError, "CUDA cannot be used in this process.");
  if (result == ncclSuccess) result = check_config(config);
  if (result == ncclSuccess && communicator == nullptr)
    result = fail(ncclInvalidArgument, "The result pointer is NULL.");
  if (result == ncclSuccess && (ranks < 1 || rank < 0 || rank >= ranks))
    result = fail(ncclInvalidArgument,
                  "Rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " ranks is invalid.");
  if (result != ncclSuccess) return note(result);
  auto* made = new ncclComm(is_blocking(config, true));
  *communicator = made;
  const std::string name = hash(&id, sizeof id);
  return issue(made, [made, name, ranks, rank] { return made->initialise(name, ranks, rank); });
}

ncclResult_t create_all(ncclComm_t* communicators, int count, const int* devices) {
  ncclUniqueId id;
  int before = 0;
  cudaGetDevice(&before);
  ncclResult_t result = make_unique_id(&id);
  if (result != ncclSuccess) return result;
  start_group();
  for (int rank = 0; result == ncclSuccess && rank < count; ++rank) {
    if (cudaSetDevice(devices != nullptr ? devices[rank] : rank) != cudaSuccess)
      result = note(fail(ncclUnhandledCudaError, "cudaSetDevice failed for rank " + std::to_string(rank) + "."));
    else
      result = create(&communicators[rank], count, id, rank, nullptr);
  }
  cudaSetDevice(before);
  return end_group(false);
}

ncclResult_t split(ncclComm_t parent, int color, int key, ncclComm_t* child, const ncclConfig_t* config) {
  ncclResult_t result = check_handle(parent);
  if (result == ncclSuccess) result = check_config(config);
  if (result == ncclSuccess) result = parent->check_usable();
  if (result == ncclSuccess && color < 0 && color != NCCL_SPLIT_NOCOLOR)
    result = fail(ncclInvalidArgument, "Color " + std::to_string(color) + " is negative.");
  if (result != ncclSuccess) return note(result);
  ncclComm* made = color == NCCL_SPLIT_NOCOLOR ? nullptr : make_child(*parent, config);
  *child = made;
  const std::string name = parent->name + "/split/" + std::to_string(parent->children++) + "/" + std::to_string(color);
  return issue(parent, [=] {
    std::vector<HostMessage> messages;
    const ncclResult_t exchanged = parent->exchange({color, key}, &messages);
    if (exchanged != ncclSuccess || made == nullptr) return exchanged;
    return join_child(made, *parent, members_of(messages, color), name);
  });
}

ncclResult_t shrink(ncclComm_t parent, const int* excluded, int count, ncclComm_t* child, const ncclConfig_t* config,
                    int flags) {
  ncclResult_t result = check_handle(parent);
  if (result == ncclSuccess) result = check_config(config);
  if (result == ncclSuccess && parent->ended) result = parent->check_usable();
  if (result == ncclSuccess && flags == NCCL_SHRINK_DEFAULT) result = parent->check_usable();
  if (result != ncclSuccess) return note(result);
  const std::vector<int> list(excluded, excluded + count);
  std::vector<int> members;
  std::string name = parent->name + "/shrink";
  for (int rank = 0; rank < parent->ranks; ++rank) {
    if (std::find(list.begin(), list.end(), rank) != list.end()) continue;
    members.push_back(rank);
    name += "/" + std::to_string(rank);
  }
  if (std::find(members.begin(), members.end(), parent->rank) == members.end())
    return note(
        fail(ncclInvalidArgument, "Rank " + std::to_string(parent->rank) + " excludes itself in ncclCommShrink."));
  if (flags & NCCL_SHRINK_ABORT) {
    const std::lock_guard lock(parent->data_mutex);
    parent->revoked = true;
  }
  fakecuda_wake();
  ncclComm* made = make_child(*parent, config);
  *child = made;
  name += "/" + std::to_string(parent->children++);
  return issue(parent, [=] { return join_child(made, *parent, members, name); });
}

}  // namespace fakenccl
