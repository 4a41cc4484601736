// Where the host did something: what a report shows of each side. It is not asked, and not destroyed, under the
// accelerator's lock, so it may need the embedding language's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace sim {

class Site {
 public:
  virtual ~Site() = default;
  virtual std::string operation() const = 0;  // "aten::add_", "copy", "allocation"
  virtual std::string stack() const = 0;      // the host's stack, outermost call first; may be empty
  // The same for the same operation called from the same lines: a loop comes to one place each time round.
  virtual std::uint64_t place() const noexcept { return reinterpret_cast<std::uintptr_t>(this); }
};
using SitePtr = std::shared_ptr<const Site>;

}  // namespace sim
