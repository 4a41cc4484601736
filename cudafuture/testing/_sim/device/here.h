// The place in the host's program that does something now, as a Site.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "runtime/site.h"

namespace sim {

// Takes the host's stack, which is cheap, and writes it out only when somebody asks. Never call it under a lock.
// `operation` must live for ever, or be a std::string.
SitePtr here(const char* operation);
SitePtr here(std::string operation);

// Where stacks come from: the embedding language. Without a hook a site has no stack.
struct HostStack {
  std::shared_ptr<const void> frames;
  std::uint64_t place = 0;  // the same for the same frames
};
using StackHook = HostStack (*)();
using FormatHook = std::string (*)(const void* stack);
void set_stack_hooks(StackHook take, FormatHook format) noexcept;

// May this thread run code of the embedding language, such as a meta kernel that is written in it? A thread that the
// language does not know may not: it could have to wait for the lock of one that waits for it.
bool may_call_python() noexcept;
void set_may_call_python(bool (*may)() noexcept) noexcept;

// Did the embedding language end what it was doing for good, as by Ctrl-C? Then no other way must be tried.
bool is_interruption(const std::exception& error) noexcept;
void set_is_interruption(bool (*is)(const std::exception& error) noexcept) noexcept;

}  // namespace sim
