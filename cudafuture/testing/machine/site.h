// The place of an operation in the host's program: a report shows it for both sides.
//
// operation() and stack() are not called under a lock of the machine, so they may take the embedding language's lock.
// The simulated accelerator destroys no site under its lock either; fakecuda does, and its sites take no lock then.
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
