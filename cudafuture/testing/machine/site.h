// The place of an operation in the host's program: a report shows it for both sides. Its methods are not called, and it
// is not destroyed, under a lock of the machine, so it may take the embedding language's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace machine {

class Site {
 public:
  virtual ~Site() = default;
  virtual std::string operation() const = 0;  // "aten::add_", "copy", "allocation"
  virtual std::string stack() const = 0;      // the host's stack, outermost call first; may be empty
  // The same for the same operation called from the same lines: a loop comes to one place each time round.
  virtual std::uint64_t place() const noexcept { return reinterpret_cast<std::uintptr_t>(this); }
};
using SitePtr = std::shared_ptr<const Site>;

}  // namespace machine
