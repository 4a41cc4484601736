// The place of an operation in the host's program: a report shows it for both sides.
//
// operation() and stack() are not called under a lock of the machine, so they may take the embedding language's lock.
// shadow.h says which machine destroys sites under its lock.
//
// Each machine takes stacks in its own way: the simulated accelerator with Python's headers (sim/bind/stacks.cpp), and
// keeps the 24 innermost frames; fakecuda, whose users need no headers of Python, with torch's traceback
// (fakecuda/operators/site.cpp), and keeps all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace machine {

// Computes the place of a site. Without frames, the operation alone is the place.
class StackPlace {
 public:
  // Innermost frame first. `code` is the address of a code object that the site keeps alive.
  void add_frame(const void* code, int instruction) noexcept {
    hash_ = hash_ * 31 + (reinterpret_cast<std::uintptr_t>(code) ^ static_cast<unsigned>(instruction));
  }
  std::uint64_t of(std::string_view operation) const noexcept {
    return hash_ ^ std::hash<std::string_view>{}(operation);
  }

 private:
  std::uint64_t hash_ = 0;
};

class Site {
 public:
  virtual ~Site() = default;
  virtual std::string operation() const = 0;  // "aten::add_", "copy", "allocation"
  virtual std::string stack() const = 0;      // a line for each frame, outermost call first; may be empty
  // The same for the same operation called from the same frames, so that the rounds of a loop share a place, and with
  // it a finding.
  virtual std::uint64_t place() const noexcept { return reinterpret_cast<std::uintptr_t>(this); }
};
using SitePtr = std::shared_ptr<const Site>;

}  // namespace machine
