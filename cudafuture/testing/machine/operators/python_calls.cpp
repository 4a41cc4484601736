#include "machine/operators/python_calls.h"

namespace machine {
namespace {

bool (*may_call)() noexcept = nullptr;
bool (*is_interrupt)(const std::exception& error) noexcept = nullptr;

}  // namespace

bool may_call_python() noexcept { return may_call == nullptr || may_call(); }
void set_may_call_python(bool (*may)() noexcept) noexcept { may_call = may; }

bool is_interruption(const std::exception& error) noexcept { return is_interrupt != nullptr && is_interrupt(error); }
void set_is_interruption(bool (*is)(const std::exception& error) noexcept) noexcept { is_interrupt = is; }

}  // namespace machine
