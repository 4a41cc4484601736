// The place in the host's program that does something now, as a Site.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "machine/site.h"

namespace sim {

// Takes the host's stack, which is cheap; the stack is formatted when a report needs it. Never call it under a lock.
// `operation` must have static storage duration, or be a std::string.
SitePtr here(const char* operation);
SitePtr here(std::string operation);

// Hooks by which the embedding language provides stacks. Without a hook a site has no stack.
struct HostStack {
  std::shared_ptr<const void> frames;
  std::uint64_t place = 0;  // the same for the same frames
};
using StackHook = HostStack (*)();
using FormatHook = std::string (*)(const void* stack);
void set_stack_hooks(StackHook take, FormatHook format) noexcept;

// True if this thread may run code of the embedding language, such as a meta kernel that is written in it. A thread
// that the language does not know may not: it could wait for the lock of a thread that waits for it.
bool may_call_python() noexcept;
void set_may_call_python(bool (*may)() noexcept) noexcept;

// True if the embedding language has interrupted the operation, as Ctrl-C does. Then no fallback may be tried.
bool is_interruption(const std::exception& error) noexcept;
void set_is_interruption(bool (*is)(const std::exception& error) noexcept) noexcept;

}  // namespace sim
