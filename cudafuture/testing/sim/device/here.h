// The place in the host's program that does something now, as a Site.
#pragma once

#include <memory>
#include <string>

#include "machine/site.h"

namespace sim {

using namespace machine;

// Takes the host's stack, which is cheap; the stack is formatted when a report needs it. Never call it under a lock.
// `operation` must have static storage duration, or be a std::string.
SitePtr here(const char* operation);
SitePtr here(std::string operation);

// Hooks by which the embedding language provides stacks (bind/stacks.cpp). Without a hook a site has no stack.
struct HostStack {
  std::shared_ptr<const void> frames;
  StackPlace place;
};
using StackHook = HostStack (*)();
using FormatHook = std::string (*)(const void* stack);
void set_stack_hooks(StackHook take, FormatHook format) noexcept;

}  // namespace sim
