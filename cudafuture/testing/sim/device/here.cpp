#include "sim/device/here.h"

#include <cstdint>
#include <string_view>
#include <utility>

namespace sim {
namespace {

StackHook stack_hook = nullptr;
FormatHook format_hook = nullptr;

class HostSite final : public Site {
 public:
  HostSite(const char* operation, std::string owned, HostStack stack)
      : literal_(operation), owned_(std::move(owned)), stack_(std::move(stack)) {}

  std::string operation() const override { return literal_ != nullptr ? literal_ : owned_; }
  std::string stack() const override {
    return stack_.frames == nullptr || format_hook == nullptr ? std::string() : format_hook(stack_.frames.get());
  }
  std::uint64_t place() const noexcept override {
    return stack_.place.of(literal_ != nullptr ? std::string_view(literal_) : owned_);
  }

 private:
  const char* literal_;
  std::string owned_;
  HostStack stack_;
};

HostStack stack_now() { return stack_hook == nullptr ? HostStack() : stack_hook(); }

}  // namespace

SitePtr here(const char* operation) { return std::make_shared<HostSite>(operation, std::string(), stack_now()); }
SitePtr here(std::string operation) { return std::make_shared<HostSite>(nullptr, std::move(operation), stack_now()); }

void set_stack_hooks(StackHook take, FormatHook format) noexcept {
  stack_hook = take;
  format_hook = format;
}

}  // namespace sim
